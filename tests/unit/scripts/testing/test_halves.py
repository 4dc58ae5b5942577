"""Outcomes of probes without their patch, from one run to the next."""

import os
import shutil
import time
from pathlib import Path

import pytest

from scripts.matrix.load import find, load
from scripts.testing import halves
from scripts.testing.acceptance import MAX_AGE

CELL = find(load(), load().default)
OTHER = find(load(), "ray2.12.0-vllm0.4.2-cpu")


@pytest.mark.parametrize(
    ("cell", "age", "again", "known"),
    [
        (CELL, 0.0, False, ["a.json"]),
        (CELL, 0.0, True, []),
        (OTHER, 0.0, False, []),
        (CELL, MAX_AGE.total_seconds() - 60, False, ["a.json"]),
        (CELL, MAX_AGE.total_seconds() + 60, False, []),
        (CELL, -3600.0, False, []),
    ],
    ids=["the next run", "again", "another cell", "not too old", "too old", "of the future"],
)
def test_what_a_run_proved_is_known_to_the_next(
    cell: object, age: float, again: bool, known: list[str], tmp_path: Path
) -> None:
    first, second, shared = (tmp_path / name for name in ("first", "second", "shared"))
    halves.lend(CELL, first, again=False, shared=shared)
    (first / "a.json").write_text("{}", encoding="utf-8")
    os.utime(first / "a.json", (0, time.time() - age))
    halves.keep(CELL, first, shared)
    halves.lend(cell, second, again, shared)  # type: ignore[arg-type]
    assert sorted(file.name for file in second.iterdir()) == known
    assert second.stat().st_mode & 0o777 == 0o777
    halves.keep(CELL, second, shared)
    assert [file.name for file in (shared / CELL.id).iterdir()] == ["a.json"]


def test_two_runs_that_keep_the_same_outcome_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, shared = tmp_path / "folder", tmp_path / "shared"
    halves.lend(CELL, folder, again=False, shared=shared)
    (folder / "a.json").write_text("{}", encoding="utf-8")
    copy = shutil.copy2

    def meanwhile(source: Path, target: Path) -> None:
        copy(source, target)
        monkeypatch.setattr(shutil, "copy2", copy)
        halves.keep(CELL, folder, shared)

    monkeypatch.setattr(shutil, "copy2", meanwhile)
    halves.keep(CELL, folder, shared)
    assert [file.name for file in (shared / CELL.id).iterdir()] == ["a.json"]
