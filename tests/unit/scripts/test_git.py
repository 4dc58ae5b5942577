"""The revision of a checkout."""

import subprocess
from pathlib import Path

from scripts.git import revision


def test_an_edit_or_an_untracked_file_makes_a_revision_dirty(tmp_path: Path) -> None:
    """An untracked file is in a build and among the tests too."""

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@y", *arguments]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "--quiet")
    assert revision(tmp_path) == "unknown-dirty"
    (tmp_path / "matrix.yaml").write_text("new", encoding="utf-8")
    git("add", ".")
    git("commit", "--quiet", "--message=x")
    commit = git("rev-parse", "HEAD")
    assert revision(tmp_path) == commit
    (tmp_path / "matrix.yaml").write_text("edited", encoding="utf-8")
    assert revision(tmp_path) == f"{commit}-dirty"
    git("checkout", "--quiet", ".")
    (tmp_path / "unknown").touch()
    assert revision(tmp_path) == f"{commit}-dirty"
