"""What is asserted about a compiled wheel, on objects that LLVM assembled."""

import zipfile
from pathlib import Path

import pytest

from scripts.hip import inspection, prove, recipes, symbols
from scripts.hip.inspection import DEEPSPEED_0_15, DEEPSPEED_0_19, EXPLAINED, VLLM_0_4, VLLM_0_29, Built
from scripts.hip.symbols import Symbols
from scripts.hip.torch_for_rocm import MASQUERADING
from scripts.matrix.load import expand, find, load
from scripts.testing import records
from tests.unit.scripts.release.test_kernels import MI200, MI300, SCALE, SCALE_942, library

GPUS = ("gfx90a", "gfx942")
STREAM = "_ZN3c103hip19getCurrentHIPStreamEa"
PROVIDERS = {
    "libc10_cuda.so": {"_ZN3c104cuda20getCurrentCUDAStreamEa", "memcpy"},
    "libc10.so": {"_ZN3c105ErrorE"},
    "libc.so.6": {"memcpy"},
}


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library have symbols of each kind."""
    undefined = {STREAM, "_ZN3c105ErrorE", "memcpy", *EXPLAINED[DEEPSPEED_0_15]}
    found = Symbols(frozenset(), frozenset(undefined), ("libc10.so", "libamdhip64.so.6"))
    monkeypatch.setattr(symbols, "read", lambda _: found)


def wheel(folder: Path, *objects: bytes) -> Path:
    path = folder / "deepspeed-1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("deepspeed/op.so", library(*objects))
        archive.writestr("amdsmi/libamd_smi.so", b"copied from the compiler's root")
    return path


def _problems(built: Built, path: Path) -> tuple[str, ...]:
    return inspection.inspect(built, path, GPUS, PROVIDERS).problems


@pytest.mark.usefixtures("linked")
def test_undefined_symbols_are_counted_by_who_defines_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(inspection.EXPECTED, DEEPSPEED_0_15, (1, 1))
    package = inspection.inspect(DEEPSPEED_0_15, wheel(tmp_path, MI200, MI300), GPUS, PROVIDERS)
    assert package.problems == ()
    assert package.undefined == {inspection.TWIN: 2, "libc10.so": 1}
    assert package.explained == EXPLAINED[DEEPSPEED_0_15]
    assert (package.lds, package.spilled) == (1024, (SCALE, SCALE_942))


def test_each_release_of_rocm_has_its_own_name_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = ("libc10.so", "libamdhip64.so.7")
    monkeypatch.setattr(symbols, "read", lambda _: Symbols(frozenset(), frozenset(), needed))
    path = wheel(tmp_path, MI300)
    assert [one for one in _problems(DEEPSPEED_0_19, path) if "libamdhip64" in one] == []
    assert [one for one in _problems(DEEPSPEED_0_15, path) if "libamdhip64" in one] == [
        "it requires libamdhip64.so.7, which torch's wheel lacks",
        "it does not require libamdhip64.so.6",
    ]


def test_everything_that_is_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Symbols(frozenset({"defined"}), frozenset({"_ZN4vllm5otherEv"}), ("libcudart.so.12",))
    monkeypatch.setattr(symbols, "read", lambda _: found)
    sources = {"host_function": "csrc/host.cu", "defined": "csrc/other.cu"}
    monkeypatch.setitem(inspection.DEFINED, DEEPSPEED_0_15, sources)
    package = inspection.inspect(DEEPSPEED_0_15, wheel(tmp_path, MI200), GPUS, PROVIDERS)
    assert package.problems == (
        "scale: not compiled for gfx942",
        "gfx90a: 1 device objects and 1 kernels, expected (1, 8)",
        "gfx942: 0 device objects and 0 kernels, expected (1, 8)",
        "csrc/host.cu is not in it: host_function is not defined",
        "undefined and unexplained: _ZN4vllm5otherEv",
        f"explained, but not undefined: {MASQUERADING}",
        "it requires libcudart.so.12, which torch's wheel lacks",
        "it does not require libamdhip64.so.6",
    )


@pytest.mark.parametrize("built", [VLLM_0_4, VLLM_0_29])
def test_the_explained_symbols_of_a_package_are_its_own(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A symbol that another package explains is unexplained, and each that this one lacks is named."""
    kept = next(iter(EXPLAINED[built]))
    other = next(symbol for one in EXPLAINED.values() for symbol in one if symbol not in EXPLAINED[built])
    found = Symbols(frozenset(), frozenset({kept, other}), (inspection.HIP[built],))
    monkeypatch.setattr(symbols, "read", lambda _: found)
    problems = inspection.inspect(built, wheel(tmp_path, MI200, MI300), GPUS, PROVIDERS).problems
    assert f"undefined and unexplained: {other}" in problems
    missing = {line.rpartition(" ")[2] for line in problems if line.startswith("explained, but not")}
    assert missing == EXPLAINED[built].keys() - {kept}


@pytest.mark.parametrize("built", [VLLM_0_4, VLLM_0_29])
def test_each_object_that_calls_hipblas_requires_it(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another object of the wheel requires does not count, and hipBLASLt is another library."""
    hip, calls = inspection.HIP[built], frozenset({"hipblasHgemm", "hipblasLtMatmul"})
    found = {
        library(MI200): Symbols(frozenset(), frozenset({"hipblasLtMatmul"}), (hip, "libhipblas.so")),
        library(MI300): Symbols(frozenset(), calls, (hip,)),
    }
    monkeypatch.setattr(symbols, "read", found.__getitem__)
    path = wheel(tmp_path, MI200)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("vllm/_C.so", library(MI300))
    problem = "vllm/_C.so leaves hipblasHgemm undefined, and does not require libhipblas.so"
    of_hipblas = [one for one in _problems(built, path) if "libhipblas" in one]
    assert of_hipblas == [problem]
    found[library(MI300)] = Symbols(frozenset(), calls, (hip, "libhipblas.so"))
    assert not [one for one in _problems(built, path) if "libhipblas" in one]


def test_every_package_with_an_expectation_has_its_explained_symbols() -> None:
    assert EXPLAINED.keys() == inspection.EXPECTED.keys() == inspection.HIP.keys()


def test_the_last_passed_records_have_exactly_the_explained_symbols() -> None:
    every = (record for cell in expand(load()) for record in records.history(cell.id, (records.COMMITTED,)))
    passed = [one for one in every if one.suite == prove.SUITE and one.outcome == "passed"]
    last = {one.cell: one for one in sorted(passed, key=lambda record: record.when)}
    seen = {
        recipes.built(find(load(), record.cell), name): set(package.explained)
        for record in last.values()
        for found in prove.report_of(record, records.COMMITTED).toolchains.values()
        for name, package in found.packages.items()
    }
    assert seen == {built: set(explained) for built, explained in EXPLAINED.items()}
