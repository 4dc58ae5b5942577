"""The state of the checkout, as git reports it."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from scripts.errors import UserError
from scripts.paths import ROOT
from scripts.processes import captured

STATUS = ("status", "--porcelain", "--untracked-files=normal")  # whatever the user has configured
DIRTY = "-dirty"  # suffix of a revision whose files differ from the commit


def revision(root: Path = ROOT) -> str:
    """Return the commit that is checked out, with `DIRTY` unless git reports that every file is committed."""
    commit = _git("rev-parse", "--verify", "--quiet", "HEAD", root=root).stdout.strip()
    status = _git(*STATUS, root=root)
    clean = commit and status.returncode == 0 and not status.stdout.strip()
    return f"{commit or 'unknown'}{'' if clean else DIRTY}"


def files() -> list[Path]:
    """Return the files of the repository: tracked ones, and untracked ones that git does not ignore."""
    listing = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout
    return [ROOT / name for name in listing.split("\0") if name]


def changed_since(commit: str, folders: Sequence[str], root: Path) -> list[str]:
    """Return the files below ``folders`` that differ from ``commit``, none if git does not know it."""
    done = _git("diff", "--name-only", "-z", commit, "--", *folders, root=root)
    return [name for name in done.stdout.split("\0") if name] if done.returncode == 0 else []


def history(*arguments: str, root: Path) -> str:
    """Return what git prints for a search for removed files; `UserError` if it cannot read the commits."""
    done = _git(*arguments, root=root)
    if done.returncode:
        why = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise UserError(f"git cannot list what was removed: {why}")
    return done.stdout


def require_clean_tree(root: Path = ROOT) -> None:
    """Raise `UserError` unless every file of the checkout is committed."""
    done = _git(*STATUS, "-z", root=root)
    if done.returncode:
        raise UserError("only committed files can be published, and this is not a git checkout")
    if changed := [entry[3:] for entry in done.stdout.split("\0") if entry]:
        raise UserError(f"the tree is dirty ({changed[0]}): commit, then build and test")


def _git(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    done = captured(["git", *arguments], root, env={**os.environ, "LC_ALL": "C"})
    if "dubious ownership" in done.stderr:
        raise UserError(
            f"git does not read {root}, which belongs to another user: "
            f"`git config --global --add safe.directory {root}`"
        )
    return done
