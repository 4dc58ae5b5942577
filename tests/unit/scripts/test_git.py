"""The state of a checkout, as git reports it."""

from pathlib import Path

import pytest

from scripts.errors import UserError
from scripts.git import require_clean_tree, revision
from tests.unit.git_command import git


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one commit."""
    git(tmp_path, "init", "--quiet")
    assert revision(tmp_path).startswith("unknown")
    (tmp_path / "matrix.yaml").write_text("a", encoding="utf-8")
    assert revision(tmp_path) == "unknown-dirty"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=x")
    return tmp_path


def test_an_edit_or_an_untracked_file_makes_a_revision_dirty(checkout: Path) -> None:
    """An untracked file is in a build and among the tests too."""
    commit = git(checkout, "rev-parse", "HEAD")
    assert revision(checkout) == commit
    (checkout / "matrix.yaml").write_text("edited", encoding="utf-8")
    assert revision(checkout) == f"{commit}-dirty"
    git(checkout, "checkout", "--quiet", ".")
    git(checkout, "config", "status.showUntrackedFiles", "no")
    (checkout / "unknown").touch()
    assert revision(checkout) == f"{commit}-dirty"


def test_only_a_clean_tree_is_accepted(checkout: Path) -> None:
    require_clean_tree(checkout)
    (checkout / "new").touch()
    with pytest.raises(UserError, match=r"the tree is dirty \(new\)"):
        require_clean_tree(checkout)


def test_a_folder_without_a_checkout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UserError, match="this is not a git checkout"):
        require_clean_tree(tmp_path)


def test_a_checkout_of_another_user_is_an_error_with_git_s_remedy(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git then answers nothing, which looked like a checkout without commits and files."""
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    remedy = f"git config --global --add safe.directory {checkout}"
    for use in (revision, require_clean_tree):
        with pytest.raises(UserError, match=f"belongs to another user: `{remedy}`"):
            use(checkout)
