"""No test uses the docker command that another test found."""

import pytest

from scripts.docker import client


@pytest.fixture(autouse=True)
def _no_cached_command() -> None:
    client.docker_command.cache_clear()
