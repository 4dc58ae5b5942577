"""The warning before a suite runs on an image that is older than files from which it is built."""

from pathlib import Path

import pytest

from scripts.images.inputs import REVISION
from scripts.matrix.load import find, load
from scripts.testing.older_image import warning
from tests.unit.git_command import git

CELL = find(load(), load().default)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one commit."""
    git(tmp_path, "init", "--quiet")
    for name in ("images/runtime", "patches/0001.patch", "docs/using.md", "matrix.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a", encoding="utf-8")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=x")
    return tmp_path


@pytest.mark.parametrize(
    ("edited", "named"),
    [
        ([], None),
        (["docs/using.md"], None),
        (["matrix.yaml"], "and matrix.yaml changed since"),
        (["patches/0001.patch", "images/runtime"], "and images/runtime and 1 more changed since"),
    ],
)
def test_files_from_which_an_image_is_built_are_compared_with_its_commit(
    edited: list[str], named: str | None, checkout: Path
) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    for name in edited:
        (checkout / name).write_text("edited", encoding="utf-8")
    for revision in (commit, f"{commit}-dirty"):
        found = warning(CELL, {REVISION: revision}, checkout)
        assert (found is None) if named is None else (found is not None and named in found)


def test_a_commit_that_git_does_not_know_gives_no_warning(checkout: Path) -> None:
    assert warning(CELL, {REVISION: "0" * 40}, checkout) is None
    assert warning(CELL, {}, checkout) is None
