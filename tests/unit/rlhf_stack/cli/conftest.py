"""Fixtures of the tests of commands."""

from collections.abc import Iterator

import pytest
from rlhf_stack.config import env_vars
from rlhf_stack.telemetry import run_log


@pytest.fixture
def messages_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Configure the messages of this process again after the test, by the variables that it had."""
    yield
    monkeypatch.undo()
    run_log.configure_messages()


@pytest.fixture
def json_lines(messages_as_before: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a command print its messages as JSON, until the end of the test."""
    monkeypatch.setenv(env_vars.LOG_FORMAT, "json")
