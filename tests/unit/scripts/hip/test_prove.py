"""What is executed and counted; a pass counts for the inputs that were compiled, and for no others."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from scripts.hip import cases, execution, inspection, prove, recipes
from scripts.hip.cases import Case
from scripts.hip.execution import Outcome
from scripts.hip.inspection import DEEPSPEED_0_15, VLLM_0_4, Package
from scripts.hip.prove import Compiled, Executed
from scripts.images import rootfs
from scripts.matrix.load import find, load
from scripts.testing import credit, records
from scripts.testing.records import FAILED, PASSED, SKIPPED

GPUS = ("gfx90a", "gfx942")
CELL = "ray2.12.0-vllm0.4.2-rocm6.1"
PACKAGE = Package("v.whl", "0" * 64, 1, {"gfx90a": 9}, {"gfx90a": 351}, 26624, (), {}, {}, ())
BUILT = {"vllm_rocm_ops": PACKAGE, "deepspeed": PACKAGE}


def test_sources_that_are_not_compiled_fail_and_are_counted_each() -> None:
    tally = records.Tally()
    outcomes = {"a.hip": (PASSED, ""), "b.hip": (FAILED, "no member"), "c.hip": (SKIPPED, "not reached")}
    prove._count(tally, "hip7.2", Compiled("HIP version: 7.2", {}, sources=outcomes), {"vllm_rocm"})
    assert tally.failures == ("hip7.2 all sources", "hip7.2 b.hip")
    assert (tally.passed, tally.skips) == (1, {"not reached": 1})


class FakeExecutor:
    """Executes nothing: every case is equal. Float32 kernels with head size 256 use scratch memory."""

    def __init__(self, *_: object) -> None:
        self.ran = list[tuple[str, str]]()

    def scratch(self, architecture: str, case: Case) -> int:
        assert architecture in GPUS
        return 16 if (case.head_size, case.type) == (256, cases.FLOAT) else 0

    def run(self, architecture: str, chosen: list[Case]) -> Iterator[tuple[Case, Outcome]]:
        for case in chosen:
            self.ran.append((architecture, case.id))
            yield case, Outcome(0.1, 0.0)


def test_every_case_is_executed_on_every_gpu_but_gfx90a_s_scratch_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = list[FakeExecutor]()

    def executor(*given: object) -> FakeExecutor:
        made.append(FakeExecutor(*given))
        return made[-1]

    wheels = {name: Path(f"{name}.whl") for name in ("vllm_rocm_ops", "deepspeed")}
    monkeypatch.setattr(rootfs, "image", lambda _: "image")
    monkeypatch.setattr(recipes, "compiled", lambda *_: (wheels, {"a.hip": (PASSED, "")}))
    monkeypatch.setattr(recipes, "torch_released", lambda *_: Path("torch.whl"))
    for name, value in (("providers", {}), ("inspect", PACKAGE), ("compiler", "HIP version: 5.7")):
        monkeypatch.setattr(inspection, name, lambda *_, value=value: value)
    monkeypatch.setattr(execution, "Executor", executor)
    matrix = load()
    found = prove._compiled(matrix, find(matrix, CELL), "hip5.7", Path("emulator"), None)
    of_cell = {VLLM_0_4, DEEPSPEED_0_15}
    every = [(gpu, case.id) for gpu in GPUS for case in cases.cases() if case.package in of_cell]
    items = [(item.architecture, named(item)) for item in found.executed]
    assert sorted(items) == sorted(every)
    skipped = {("gfx90a", f"paged_attention_v{version}-head256-float32") for version in (1, 2)}
    assert {key for key, item in zip(items, found.executed, strict=True) if item.reason} == skipped
    assert {item.outcome for item in found.executed if item.reason} == {SKIPPED}
    assert {item.outcome for item in found.executed if not item.reason} == {PASSED}
    (one,) = made
    assert sorted(one.ran) == sorted({*every} - skipped)


def named(item: Executed) -> str:
    size = f"-head{item.head_size}" if item.head_size else ""
    return f"{item.kernel}{size}-{item.type}"


def test_only_the_reason_of_gfx90a_excuses_a_kernel_that_was_not_executed() -> None:
    tally = records.Tally()
    items = (
        replace(executed("gfx90a", 0.0), error=None, reason=prove.NO_SCRATCH),
        replace(executed("gfx942", 0.0), error=None, reason="the emulator ended with 1"),
        replace(executed("gfx942", 1e-4), kernel="wrong"),
    )
    prove._count(tally, "hip5.7", Compiled("HIP version: 5.7", {"deepspeed": PACKAGE}, items), {"deepspeed"})
    assert tally.failures == ("hip5.7 gfx942 rms_norm float32", "hip5.7 gfx942 wrong float32")
    assert (tally.passed, tally.skips) == (1, {prove.NO_SCRATCH: 1})


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
        return Compiled("HIP version: 5.7", BUILT, ())

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
        return Compiled("HIP version: 5.7", BUILT, ran)

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
