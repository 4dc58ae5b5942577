"""The table of patches after their tests, and the error for a patch that is not proved alone."""

import io

import msgspec
import pytest
from rich.console import Console

from scripts.matrix.load import find, load
from scripts.patches.series import load_all, series_of
from scripts.testing import proofs
from scripts.testing.records import Proof

CELL = find(load(), load().default)
SERIES = series_of(CELL)
FAILED, PASSED = "exit 1: ImportError: no /a/path", "exit 0: ok"


def proof(patch: str, without: str = FAILED, patched: str = PASSED) -> Proof:
    return Proof("tests/patches/test_it.py", "a", without, patched, patch)


ALL = [proof(one.id_of(patch)) for one in SERIES for patch in one.patches]


def test_each_patch_has_the_outcomes_of_its_own_tests() -> None:
    series = load_all()[0]
    first, second = (series.id_of(patch) for patch in series.patches[:2])
    ended = [
        proof(first),
        proof(first, "exit 1: AssertionError: x"),
        proof(second, "exit 0: it is not needed", "exit 1: no"),
        Proof(series.patches[2].header["Test"], "of the released package", FAILED, PASSED),
    ]
    assert proofs.proofs_of([series], ended) == {
        f"{series.package}/{series.patches[0].name}": proofs.Proved(
            "fails (AssertionError, ImportError)", "passes"
        ),
        f"{series.package}/{series.patches[1].name}": proofs.Proved("passes", "fails"),
    }
    assert proofs.proofs_of([series], []) == {}


def report(ended: list[Proof]) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    code = proofs.report(CELL, SERIES, ended, console)
    return code, console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_has_every_patch_of_the_cell() -> None:
    code, text = report(ALL)
    assert code == 0
    for one in SERIES:
        for patch in one.patches:
            assert f"{one.package}/{patch.name}" in text
    assert text.count("fails (ImportError)") == sum(len(one.patches) for one in SERIES)


@pytest.mark.parametrize(
    "others", [[], [(PASSED, PASSED)], [(FAILED, FAILED)]], ids=["no test ran", "not needed", "not fixed"]
)
def test_a_patch_without_a_proof_is_an_error(others: list[tuple[str, str]]) -> None:
    name = SERIES[0].id_of(SERIES[0].patches[0])
    rest = [other for other in ALL if other.patch != name]
    code, text = report([*rest, *(proof(name, *outcomes) for outcomes in others)])
    assert code == 1
    assert f"error: {SERIES[0].package}/{SERIES[0].patches[0].name}: no test failed without it" in text


def test_patches_are_proved_on_cpu_cells_alone() -> None:
    accelerator = msgspec.structs.replace(CELL.accelerator, kind="cuda")
    assert proofs.unproved(msgspec.structs.replace(CELL, accelerator=accelerator), SERIES, []) == []
