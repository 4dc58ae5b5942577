"""Which changes of a file are noted when it runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.patches.changes import EXECUTED, mark

BEFORE = '''"""A module."""
from __future__ import annotations

def one(x):
    """A docstring."""
    if x == 1:
        return 1
    return 0


def two():
    try:
        raise OSError
    except KeyError:
        return 1


class Kind:
    def method(self):
        return 1
'''


def executed(after: str, call: str, folder: Path) -> dict[str, bool]:
    """Whether each change was executed when another process imported the file and called something."""
    source, marks = mark(after, {"a patch": BEFORE, "another": after}, "m.py")
    assert marks["another"] == {}
    (folder / "m.py").write_text(source, encoding="utf-8")
    notes = folder / "notes"
    notes.write_text("", encoding="utf-8")
    code = f"from m import *\ntry:\n    {call}\nexcept OSError:\n    pass"
    environment = os.environ | {EXECUTED: str(notes)}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True)
    noted = set(notes.read_text(encoding="utf-8").splitlines())
    return {change: noted.issuperset(of_it) for change, of_it in marks["a patch"].items()}


@pytest.mark.parametrize(
    ("old", "new", "line", "runs", "does_not"),
    [
        ("        return 1\n    return 0", "        return 2\n    return 0", 7, "one(1)", "one(0)"),
        ("    if x == 1:\n", "    if x == 1 or 0:\n", 6, "one(0)", "two()"),
        ("    if x == 1:\n        return 1\n", "", 6, "one(0)", "two()"),
        ("    return 0\n", "    elif x == 2:\n        return 2\n    return 0\n", 8, "one(2)", "one(1)"),
        ("def one(x):", "def one(x, y=1):", 4, "one(1)", "two()"),
        ("def two():", "@staticmethod\ndef two():", 11, "two()", "one(1)"),
        (
            *("except KeyError:", "except LookupError:", 14),
            *("two.__globals__.update(OSError=KeyError); two()", "two()"),
        ),
        ("class Kind:", "class Kind(object):", 18, "1", ""),
    ],
    ids=["branch", "condition", "removed", "elif", "header", "decorator", "except", "class"],
)
def test_a_change_counts_when_its_statements_run(
    old: str, new: str, line: int, runs: str, does_not: str, tmp_path: Path
) -> None:
    after = BEFORE.replace(old, new, 1)
    if runs:
        assert executed(after, runs, tmp_path) == {f"m.py:{line}": True}
    if does_not:
        assert executed(after, does_not, tmp_path) == {f"m.py:{line}": False}


def test_comments_and_docstrings_are_no_change(tmp_path: Path) -> None:
    after = BEFORE.replace("A docstring.", "Another.").replace(
        "    return 0\n", "    # a comment\n    return 0\n"
    )
    assert executed(after, "one(1)", tmp_path) == {}


def test_all_statements_of_a_change_have_to_run(tmp_path: Path) -> None:
    after = BEFORE.replace("    return 0\n", "    if x == 2:\n        return 2\n    return 0\n")
    assert executed(after, "one(2)", tmp_path) == {"m.py:8": True}
    assert executed(after, "one(3)", tmp_path) == {"m.py:8": False}


def test_a_marked_statement_runs_without_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As upstream's parser, which `rlhf_stack.openrlhf.command_line` runs alone."""
    source, _ = mark(f"{BEFORE}\nfile = 1\n", {"a patch": BEFORE}, "m.py")
    notes, scope = tmp_path / "notes", {"file": 2}
    monkeypatch.setenv(EXECUTED, str(notes))
    exec("\n".join(source.splitlines()[-2:]), scope)  # noqa: S102
    assert notes.read_text(encoding="utf-8") == "m.py:22\n"
    assert scope["file"] == 1
