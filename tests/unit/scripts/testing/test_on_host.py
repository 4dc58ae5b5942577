"""The pytest suites of the host."""

from pathlib import Path

import pytest

from scripts.matrix.load import find, load
from scripts.matrix.suites import SUITES, Suite
from scripts.testing import on_host

CELL = find(load(), load().default)


def test_a_file_that_cannot_be_imported_is_a_failure_and_no_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest's exit code would be that of Ctrl-C, after which nothing is recorded."""
    folder = tmp_path / "tests" / "broken"
    folder.mkdir(parents=True)
    (tmp_path / "pytest.ini").touch()
    (folder / "test_broken_import.py").write_text("import no_such_module", encoding="utf-8")
    (folder / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--cell')", encoding="utf-8"
    )
    monkeypatch.setattr(on_host, "ROOT", tmp_path)
    monkeypatch.setattr(on_host, "SUITES", {**SUITES, "broken": Suite("", place="host", folder="broken")})
    assert on_host._run_pytest(CELL, "broken", [], tmp_path / "junit.xml") == 1
