"""The files that lint checks, and its result."""

from pathlib import Path

import pytest

from scripts import lint


def test_a_shell_script_is_recognized_by_its_first_line(tmp_path: Path) -> None:
    texts = {
        "a": "#!/bin/sh\n",
        "b": "#!/usr/bin/env bash\n",
        "c.sh": "echo\n",
        "d": "#!/usr/bin/python3\n",
        "e": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = [tmp_path / name for name in (*texts, "absent")]
    assert lint.shell_scripts(files) == [tmp_path / "a", tmp_path / "b"]


def test_lint_names_every_check_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lint, "checks", lambda: {"good": ["true"], "bad": ["false"], "worse": ["false"]})
    assert lint.lint() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "failed: bad, worse"
    monkeypatch.setattr(lint, "checks", lambda: {"good": ["true"]})
    assert lint.lint() == 0
