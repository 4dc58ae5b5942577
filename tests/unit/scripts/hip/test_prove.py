"""A pass of the suite counts for the inputs that were compiled, and for no others."""

from functools import partial
from pathlib import Path

import pytest

from scripts.hip import execution, inspection, prove, recipes
from scripts.hip.inspection import Package
from scripts.hip.prove import Compiled, Executed
from scripts.matrix.load import find, load
from scripts.testing import credit, records
from scripts.testing.records import FAILED, PASSED, SKIPPED

CELL = "ray2.12.0-vllm0.4.2-rocm6.1"
PACKAGE = Package("v.whl", "0" * 64, 1, {"gfx90a": 9}, {"gfx90a": 351}, 26624, (), {}, {}, ())


def test_sources_that_are_not_compiled_fail_and_are_counted_each() -> None:
    tally = records.Tally()
    outcomes = {"a.hip": (PASSED, ""), "b.hip": (FAILED, "no member"), "c.hip": (SKIPPED, "not reached")}
    prove._count(tally, "hip7.2", Compiled("HIP version: 7.2", {}, sources=outcomes), {"vllm_rocm"})
    assert tally.failures == ("hip7.2 all sources", "hip7.2 b.hip")
    assert (tally.passed, tally.skips) == (1, {"not reached": 1})


@pytest.fixture
def _own_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the records of this test below ``tmp_path``, of a clean tree."""
    for name in ("passed_before", "recording"):
        function = partial(getattr(credit, name), roots=(tmp_path,), shared=tmp_path / "shared")
        monkeypatch.setattr(credit, name, function)
    monkeypatch.setattr(records, "revision", lambda: "c" * 40)
    for module in (credit, records):
        monkeypatch.setattr(module, "suite_digest", lambda _: "d" * 64)


@pytest.mark.usefixtures("_own_records")
def test_a_pass_on_other_inputs_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, compiled = "", list[str]()

    def compile_(*_: object) -> Compiled:
        compiled.append(inputs)
        return Compiled("HIP version: 5.7", dict.fromkeys(inspection.EXPECTED, PACKAGE), ())

    monkeypatch.setattr(prove, "_compiled", compile_)
    monkeypatch.setattr(recipes, "digest", lambda *_: inputs)
    for inputs in ("a" * 64, "f" * 64, "a" * 64):
        code, record = prove.prove(load(), find(load(), CELL), again=False)
        assert record
        assert (code, record.inputs, record.image) == (0, inputs, f"{inputs[:12]} by hip5.7")
    assert compiled == ["a" * 64, "f" * 64]


@pytest.mark.usefixtures("_own_records")
def test_a_pass_without_an_emulator_is_repeated_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulators = list[Path | None]()

    def compile_(_matrix: object, _cell: object, _name: str, emulator: Path | None, *_: object) -> Compiled:
        emulators.append(emulator)
        ran = (executed("gfx942", 0.0),) if emulator else ()
        return Compiled("HIP version: 5.7", dict.fromkeys(inspection.EXPECTED, PACKAGE), ran)

    monkeypatch.setattr(prove, "_compiled", compile_)
    monkeypatch.setattr(recipes, "digest", lambda *_: "a" * 64)
    monkeypatch.setattr(prove, "sha256_file", lambda _: "e" * 64)
    monkeypatch.delenv(execution.CHECKOUT, raising=False)
    for _ in range(2):
        prove.prove(load(), find(load(), CELL), again=False)
    assert emulators == [None]
    monkeypatch.setenv(execution.CHECKOUT, str(tmp_path))
    monkeypatch.setattr(execution, "checkout", lambda: tmp_path)
    for _ in range(2):
        code, record = prove.prove(load(), find(load(), CELL), again=False)
        assert record
        assert (code, record.skips) == (0, {})
    assert emulators == [None, tmp_path]


def executed(architecture: str, error: float) -> Executed:
    return Executed("rms_norm", "float32", None, architecture, 0.1, error, 1e-5)
