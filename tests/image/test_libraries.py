"""Every shared object of the heavy packages finds its libraries and its symbols in what the cell ships.

The loader checks it in the state in which a process loads such an object: the program is this Python,
torch's global libraries are loaded, and the folders of the libraries of ``import torch`` are searched. The
object does not run, so a machine without a GPU can check libraries for a GPU.
"""

import ctypes
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest
from rlhf_stack.config import env_vars

PACKAGES = ("torch", "vllm", "xformers", "deepspeed", "ray", "flash-attn")
SHARED = re.compile(r"\.so(\.[0-9]+)*$")
ELF = b"\x7fELF"
# What ``import torch`` has loaded before any other object: its global libraries, and HIP, which torch's wheel
# for ROCm has as this file, and other objects require by its SONAME.
LOADED = ("libtorch_global_deps.so", "libamdhip64.so")
# Part of the machine's driver, with all functions that match the pattern.
DRIVER, OF_DRIVER = "libcuda.so.1", re.compile(r"cu[A-Z]\w+")
# What NCCL and UCX load for RDMA adapters, and the drivers of adapters of NVIDIA, Amazon and Broadcom.
VERBS, PROVIDERS = ("libibverbs.so.1", "librdmacm.so.1"), Path("/usr/lib/x86_64-linux-gnu/libibverbs")
DRIVERS = {"bnxt_re", "efa", "mlx5"}
SECONDS = 60


@dataclass(frozen=True)
class Finding:
    """The libraries and symbols that the loader did not find for an object, and the files that it loaded."""

    libraries: frozenset[str]
    symbols: frozenset[str]
    loaded: frozenset[Path] = frozenset()

    def without_driver(self) -> "Finding":
        """Return the finding without the parts that a GPU's driver provides."""
        if DRIVER not in self.libraries:
            return self
        symbols = frozenset(name for name in self.symbols if not OF_DRIVER.fullmatch(name))
        return Finding(self.libraries - {DRIVER}, symbols, self.loaded)


def parse(output: str) -> Finding:
    """Parse ld.so's output: ``NAME => FILE``, ``NAME => not found``, ``undefined symbol: NAME``."""
    libraries = re.findall(r"^\s*(\S+) => not found", output, re.MULTILINE)
    symbols = re.findall(r"undefined symbol: (\w+)", output)
    loaded = re.findall(r"^\s*\S+ => (/\S+)", output, re.MULTILINE)
    return Finding(
        frozenset(libraries), frozenset(symbols), frozenset(Path(file).resolve() for file in loaded)
    )


def trace(objects: Iterable[Path], folders: Iterable[Path]) -> Finding:
    """Let the loader bind all symbols of ``objects`` in a Python, as ``ldd -r`` does, and run nothing."""
    environment = {
        "LD_TRACE_LOADED_OBJECTS": "1",
        "LD_WARN": "1",
        "LD_BIND_NOW": "1",
        "LD_LIBRARY_PATH": ":".join(map(str, folders)),
        "LD_PRELOAD": ":".join(map(str, objects)),
    }
    done = subprocess.run(
        [sys.executable],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert "cannot be preloaded" not in done.stdout, done.stdout
    assert "libc.so.6" in done.stdout, f"the loader printed no trace: {done.stdout}"
    return parse(done.stdout)


def shared_objects(distribution: Distribution) -> list[Path]:
    """Return the shared objects that a package lists, each file once."""
    files = [Path(str(file.locate())) for file in distribution.files or [] if SHARED.search(file.name)]
    return sorted({file.resolve() for file in files if file.open("rb").read(4) == ELF})


@pytest.fixture(scope="module")
def folders() -> list[Path]:
    """Return the folders of the libraries that ``import torch`` loads."""
    script = "import torch; print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    loaded = {Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines() if SHARED.search(line)}
    return sorted({path.parent for path in loaded if "site-packages" in path.parts})


@pytest.fixture
def objects(
    cell: dict[str, Any], headlines: dict[str, Distribution], installed: dict[str, Distribution]
) -> Callable[[str], list[Path]]:
    """Return a function from a package's name to its shared objects, including those of our recipe for it."""

    def of(name: str) -> list[Path]:
        builds = [build for build in cell["build_from_source"] if build["package"] == name]
        from_recipes = [installed.get(build["recipe"]) for build in builds if build["recipe"]]
        found = [headlines.get(name) or installed.get(name), *from_recipes]
        return [path for distribution in found if distribution for path in shared_objects(distribution)]

    return of


def test_the_loader_reports_what_is_missing(objects: Callable[[str], list[Path]]) -> None:
    """The loader reports an object of vLLM that uses torch, without torch's folder in the search path."""
    extension = next(path for path in objects("vllm") if b"libc10.so" in path.read_bytes())
    finding = trace([extension], [])
    assert "libc10.so" in finding.libraries
    assert finding.symbols


def test_only_the_driver_s_part_is_ignored() -> None:
    """The input is the loader's output on a machine without a GPU."""
    printed = f"\t{DRIVER} => not found\n\tlibx.so => not found\nundefined symbol: cuInit\t(a.so)\n"
    assert parse(printed).without_driver() == Finding(frozenset({"libx.so"}), frozenset())
    assert parse("undefined symbol: cuInit\t(a.so)\n").without_driver().symbols == {"cuInit"}


@pytest.mark.skipif(env_vars.accelerator() == "cpu", reason="for GPUs, which this cell does not have")
def test_rdma_libraries_and_the_drivers_of_adapters_load() -> None:
    """Without one of them NCCL uses TCP, with no error; a machine without an adapter can load them too."""
    drivers = {file.name.partition("-")[0].removeprefix("lib"): file for file in PROVIDERS.glob("*.so")}
    assert drivers.keys() >= DRIVERS
    for library in (*VERBS, *map(str, drivers.values())):
        ctypes.CDLL(library)


def test_triton_has_the_linker_of_amd_kernels() -> None:
    """Its wheels for ROCm contain ld.lld (triton-lang/triton#3662); newer releases link without a program."""
    import torch

    if torch.version.hip is None:
        pytest.skip("this image has no Triton for AMD GPUs")
    backend = importlib.import_module("triton.backends.amd.compiler").HIPBackend
    if find := getattr(backend, "path_to_rocm_lld", None):
        assert Path(find()).is_file()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PACKAGES)
def test_no_library_and_no_symbol_is_missing(
    name: str, objects: Callable[[str], list[Path]], folders: list[Path]
) -> None:
    """Every shared object is complete, except for the GPU driver's part if torch is built for GPUs."""
    import torch

    if not (paths := objects(name)):
        pytest.skip(f"{name} has no shared object in this image")
    first = [path for path in objects("torch") if path.name in LOADED]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda path: trace([*first, path], folders), paths))
    if torch.version.cuda:
        found = [finding.without_driver() for finding in found]
    missing = {
        path: sorted(finding.libraries | finding.symbols)
        for path, finding in zip(paths, found, strict=True)
        if finding.libraries or finding.symbols
    }
    # An object may rely on the libraries of the object that loads it: it was bound together with that one.
    bound = {
        file
        for path, finding in zip(paths, found, strict=True)
        if path not in missing
        for file in finding.loaded
    }
    assert {str(path): names for path, names in missing.items() if path not in bound} == {}
