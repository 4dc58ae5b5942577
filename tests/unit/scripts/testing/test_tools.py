from pathlib import Path

import pytest
from filelock import FileLock

from scripts.matrix.load import expand, load
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
