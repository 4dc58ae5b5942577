"""The table of patches after their tests, and the error for a patch that is not proved alone."""

import io

import msgspec
import pytest
from rich.console import Console

from scripts.matrix.load import find, load
from scripts.patches.series import load_all, series_of
from scripts.testing import proofs
from scripts.testing.records import Executed, Proof, Tally

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
    code = proofs.report(CELL, SERIES, Tally(proofs=ended), console)
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


def skipped(patch: str) -> Proof:
    return Proof("tests/patches/test_it.py", "a", "", "", patch, skipped="for CPUs alone")


def test_only_in_an_image_for_gpus_the_tests_of_a_patch_may_all_be_skipped() -> None:
    accelerator = msgspec.structs.replace(CELL.accelerator, kind="cuda")
    for_gpus = msgspec.structs.replace(CELL, accelerator=accelerator)
    name, first = ALL[0].patch, f"{SERIES[0].package}/{SERIES[0].patches[0].name}"
    assert proofs.unproved(for_gpus, SERIES, [skipped(name), *ALL[1:]]) == []
    assert proofs.unproved(CELL, SERIES, [skipped(name), *ALL[1:]]) == [first]
    assert proofs.unproved(for_gpus, SERIES, ALL[1:]) == [first]
    found = proofs.proofs_of(SERIES, [skipped(name)])
    assert found == {first: proofs.Proved("skipped: for CPUs alone", "")}


def test_a_change_is_missed_if_no_suite_executed_it() -> None:
    name = ALL[0].patch
    suites = [{name: Executed(3, ("a.py:1", "a.py:9"))}, {}, {name: Executed(3, ("a.py:9",))}]
    [(patch, executed)] = proofs.executed_of(SERIES, suites).items()
    assert patch == f"{SERIES[0].package}/{SERIES[0].patches[0].name}"
    assert proofs.described(executed, {}) == "2 of 3, not a.py:9"
    assert proofs.described(executed, {"a.py:9": "why"}) == "2 of 3, not a.py:9 (why)"
    assert proofs.described(Executed(1, ()), {"a.py:9": "why"}) == "1 of 1"
    both = dict.fromkeys(("a.py:1", "a.py:9"), "why")
    assert proofs.described(Executed(3, ("a.py:1", "a.py:9")), both) == "1 of 3, not a.py:1, a.py:9 (why)"


def test_the_stubs_of_all_tests_of_a_patch_are_listed() -> None:
    tests = [Proof("f", "a", FAILED, PASSED, ALL[0].patch, (stub,)) for stub in ("ray.get", "an engine")]
    [proved] = proofs.proofs_of(SERIES, tests).values()
    assert proved.stubs == ("an engine", "ray.get")


def test_a_change_that_is_not_executed_needs_a_reason() -> None:
    executed = {"p/1/a": Executed(3, ("a.py:1", "a.py:9")), "p/1/b": Executed(1, ())}
    reasons = {"p/1/a": {"a.py:9": "why", "a.py:2": "why"}, "p/1/of another cell": {"c.py:1": "why"}}
    assert proofs.unexplained(executed, reasons) == [
        "p/1/a: no test executed a.py:1: extend one",
        "tests/patches/not_executed.toml: p/1/a a.py:2 was executed or is no change",
    ]
    executed["p/1/a"] = Executed(3, ("a.py:9",))
    assert proofs.unexplained(executed, {"p/1/a": {"a.py:9": "why"}}) == []


def test_each_reason_is_about_a_patch() -> None:
    assert proofs.reasons().keys() <= {one.id_of(patch) for one in load_all() for patch in one.patches}


@pytest.mark.parametrize(("kind", "stand_in"), [("cpu", ""), ("cpu", "for ROCm"), ("cuda", "")])
def test_in_a_cell_for_cpus_a_change_that_no_test_executes_is_an_error(kind: str, stand_in: str) -> None:
    name = ALL[0].patch
    tally = Tally(proofs=ALL, executed={name: Executed(3, ("a.py:1",))})
    console = Console(file=io.StringIO(), width=200)
    accelerator = msgspec.structs.replace(CELL.accelerator, kind=kind)
    cell = msgspec.structs.replace(CELL, accelerator=accelerator, stand_in=stand_in)
    is_error = kind == "cpu" and not stand_in
    assert proofs.report(cell, SERIES, tally, console) == is_error
    assert (f"error: {name}: no test executed a.py:1" in console.file.getvalue()) == is_error  # type: ignore[attr-defined]
