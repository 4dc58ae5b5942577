from pathlib import Path
from unittest.mock import MagicMock

import pytest
from filelock import FileLock

from scripts.matrix.load import expand, load
from scripts.matrix.suites import SUITES
from scripts.testing import in_image


def test_the_installer_of_pytest_can_lock_its_target_folder_as_uv_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_image, "TOOLS", tmp_path / "testing" / "tools")

    def install(requirements: Path, _: str) -> None:
        with FileLock(requirements.parent / ".lock", blocking=False):
            (requirements.parent / "pytest.py").touch()

    monkeypatch.setattr(in_image, "_install", install)
    folder = in_image.test_tools(expand(load())[0])
    assert (folder / "pytest.py").exists()


def test_a_suite_in_a_container_has_the_limit_of_its_declaration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, limits = MagicMock(), MagicMock()
    container = client.containers.create.return_value
    container.wait.return_value = {"StatusCode": 0}
    container.logs.return_value = []
    monkeypatch.setattr(in_image, "test_tools", lambda _: tmp_path)
    monkeypatch.setattr(in_image, "killed_after", limits)
    run = in_image.Run("integration", "an-image", "title")
    assert in_image._run_in_container(client, expand(load())[0], run, in_image.OWN_USER, tmp_path) == 0
    limits.assert_called_once_with(SUITES["integration"].hours, container, "integration")
