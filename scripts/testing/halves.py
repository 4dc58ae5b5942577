"""Outcomes of probes without their patch, which need not run again with the same pins, patches and tests.

The container has a folder of them, by a digest of these (tests/patches/conftest.py). The user's cache keeps
them for every checkout of the machine, each for `MAX_AGE`.
"""

import shutil
import time
import uuid
from pathlib import Path

from scripts.matrix.model import Cell
from scripts.paths import CACHE
from scripts.testing.acceptance import MAX_AGE

SHARED = CACHE / "proofs"


def lend(cell: Cell, folder: Path, again: bool, shared: Path = SHARED) -> None:
    """Make ``folder``, writable for every user of a container, with what is known; empty to run ``again``."""
    folder.mkdir()
    folder.chmod(0o1777)
    for file in () if again else (shared / cell.id).glob("*.json"):
        if 0 <= time.time() - file.stat().st_mtime <= MAX_AGE.total_seconds():
            shutil.copy2(file, folder)


def keep(cell: Cell, folder: Path, shared: Path = SHARED) -> None:
    """Copy what ``folder`` has to the cache."""
    target = shared / cell.id
    target.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.json"):
        unfinished = target / f"{file.stem}-{uuid.uuid4().hex}.unfinished"  # other runs keep the same file
        shutil.copy2(file, unfinished)
        unfinished.rename(target / file.name)
