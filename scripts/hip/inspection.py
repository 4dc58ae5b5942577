"""What is asserted about the compiled wheels: their kernels, and the symbols that they leave undefined."""

import re
import subprocess
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

import msgspec

from scripts.digests import sha256_file
from scripts.docker.client import docker_command
from scripts.errors import UserError
from scripts.hip import symbols
from scripts.hip.torch_for_rocm import LIBRARIES, MASQUERADING, OF_ROCM_7
from scripts.processes import captured
from scripts.release import kernels
from scripts.release.kernels import Kernel

Built = tuple[str, int]  # a package, and the major release of ROCm whose torch it is built for
VLLM_0_4, VLLM_0_29 = ("vllm_rocm_ops", 6), ("vllm_rocm", 7)
DEEPSPEED_0_15, DEEPSPEED_0_19 = ("deepspeed", 6), ("deepspeed", 7)
# Device objects and kernels of each package for each architecture. Nine of the ten CUDA sources in the
# CMakeLists.txt of vLLM 0.4.2 have kernels; the tenth, cuda_utils_kernels.cu, queries the device.
EXPECTED: dict[Built, tuple[int, int]] = {
    VLLM_0_4: (9, 351),
    DEEPSPEED_0_15: (1, 8),
    VLLM_0_29: (33, 6158),
    DEEPSPEED_0_19: (1, 8),
}
# What the sources without kernels define, by which it is seen that they are in.
DEFINED: dict[Built, dict[str, str]] = {
    VLLM_0_4: {
        "PyInit__C": "csrc/pybind.cpp",
        "_Z20get_device_attributeii": "csrc/cuda_utils_kernels.cu",
    }
}
COPIED = "amdsmi/"  # of a wheel: the compiler's root has this library, no recipe compiles it
OF_TORCH = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so")
CUDA, TWIN = "libc10_cuda.so", "libc10_hip.so, by its name in libc10_cuda.so"
OF_SYSTEM = (
    "libamdhip64.so",
    "libstdc++.so.6",
    "libc.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "ld-linux-x86-64.so.2",
    "libpython3.11.so.1.0",
)
# How each requires HIP: the recipe of vLLM's names the file in torch's wheel. DeepSpeed's own build names the
# SONAME, under which ``import torch`` has loaded that file.
HIP: dict[Built, str] = {
    VLLM_0_4: "libamdhip64.so",
    VLLM_0_29: "libamdhip64.so",
    DEEPSPEED_0_15: LIBRARIES["libamdhip64.so"],
    DEEPSPEED_0_19: OF_ROCM_7["libamdhip64.so"],
}
# All that call hipBLAS name the file in torch's wheel. hipBLASLt's functions are those of another library.
BLAS, OF_BLAS = "libhipblas.so", re.compile(r"hipblas(?!Lt)[A-Z]\w*")
LOADED = {*LIBRARIES, "libstdc++.so.6", "libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
MASQUERADED = {MASQUERADING: "libtorch_hip.so; declared by torch's header of the same name"}
HGEMM = {"hipblasHgemm": "libhipblas.so, which the wheel contains; declared by hipBLAS's header"}
SHIMS = (
    "_ZN2at4cuda26getCurrentDevicePropertiesEv",
    "aoti_torch_get_current_cuda_stream",
    "torch_c10_cuda_check_msg",
    "torch_c10_cuda_free_error_msg",
    "torch_get_current_cuda_blas_handle",
)
# What each package leaves undefined that nothing here defines, and which library of torch's wheel does.
EXPLAINED: dict[Built, dict[str, str]] = {
    DEEPSPEED_0_15: MASQUERADED,
    DEEPSPEED_0_19: {},
    VLLM_0_4: {
        "_ZN2at4cuda24getCurrentCUDABlasHandleEv": "libtorch_hip.so; in libtorch_cuda.so under the same name",
        **MASQUERADED,
        **HGEMM,
    },
    VLLM_0_29: {
        **dict.fromkeys(SHIMS, "libtorch_hip.so; in libtorch_cuda.so of torch 2.12 under the same name"),
        **HGEMM,
    },
}


class Package(msgspec.Struct, frozen=True):
    """A compiled wheel: sizes in bytes, counts by architecture, undefined symbols by who defines them."""

    wheel: str
    sha256: str
    size: int
    objects: dict[str, int]
    kernels: dict[str, int]
    lds: int
    spilled: tuple[Kernel, ...]
    undefined: dict[str, int]
    explained: dict[str, str]
    problems: tuple[str, ...]


def inspect(
    built: Built, wheel: Path, architectures: Sequence[str], providers: Mapping[str, Set[str]]
) -> Package:
    """Return the facts about a wheel, with everything that is wrong about it."""
    with zipfile.ZipFile(wheel) as archive:
        compiled = [file for file in archive.namelist() if not file.startswith(COPIED)]
        shared = {file: archive.read(file) for file in compiled if file.endswith(".so")}
    objects = Counter(own for content in shared.values() for own, _, _ in kernels.code_objects(content))
    found = [kernel for content in shared.values() for kernel in kernels.kernels(content)]
    counts = Counter(kernel.architecture for kernel in found)
    linked = {file: symbols.read(content) for file, content in shared.items()}
    undefined = set().union(*(one.undefined for one in linked.values()))
    owners = {symbol: owner(symbol, providers) for symbol in undefined}
    left = {symbol for symbol, owned in owners.items() if not owned}
    needed = {library for one in linked.values() for library in one.needed}
    defined = set().union(*(one.defined for one in linked.values()))
    explained = EXPLAINED[built]
    return Package(
        wheel=wheel.name,
        sha256=sha256_file(wheel),
        size=wheel.stat().st_size,
        objects=dict(sorted(objects.items())),
        kernels=dict(sorted(counts.items())),
        lds=max((kernel.lds for kernel in found), default=0),
        spilled=tuple(sorted(kernel for kernel in found if kernel.vgpr_spills or kernel.sgpr_spills)),
        undefined=dict(sorted(Counter(owned for owned in owners.values() if owned).items())),
        explained={symbol: explained[symbol] for symbol in sorted(left & explained.keys())},
        problems=(
            *kernels.problems(found, architectures),
            *(
                f"{gpu}: {objects[gpu]} device objects and {counts[gpu]} kernels, expected {EXPECTED[built]}"
                for gpu in architectures
                if (objects[gpu], counts[gpu]) != EXPECTED[built]
            ),
            *(
                f"{source} is not in it: {symbol} is not defined"
                for symbol, source in DEFINED.get(built, {}).items()
                if symbol not in defined
            ),
            *(f"undefined and unexplained: {symbol}" for symbol in sorted(left - explained.keys())),
            *(f"explained, but not undefined: {symbol}" for symbol in sorted(explained.keys() - left)),
            *(
                f"it requires {library}, which torch's wheel lacks"
                for library in sorted(needed - LOADED - {HIP[built]})
            ),
            *(() if HIP[built] in needed else (f"it does not require {HIP[built]}",)),
            *(
                f"{file} leaves {symbol} undefined, and does not require {BLAS}"
                for file, one in linked.items()
                if BLAS not in one.needed
                for symbol in sorted(filter(OF_BLAS.fullmatch, one.undefined))
            ),
        ),
    )


def owner(symbol: str, providers: Mapping[str, Set[str]]) -> str | None:
    """Return the library that defines a symbol, or None."""
    if symbols.of_cuda(symbol) in providers[CUDA]:
        return TWIN
    return next((name for name, defined in providers.items() if name != CUDA and symbol in defined), None)


def providers(builder: str, torch: Path) -> dict[str, Set[str]]:
    """Return the symbols that torch's CUDA wheel and the libraries of a toolchain's root define."""
    found: dict[str, Set[str]] = {}
    with zipfile.ZipFile(torch) as archive:
        for name in (*OF_TORCH, CUDA):
            found[name] = symbols.read(archive.read(f"torch/lib/{name}")).defined
    for name, content in _read(builder, OF_SYSTEM):
        found[name] = symbols.read(content).defined
    return found


def compiler(builder: str) -> str:
    """Return the first two lines that hipcc prints about itself."""
    program = ["/opt/rocm/bin/hipcc", "--version"]
    done = captured([*docker_command(), "run", "--rm", "--network=none", builder, *program])
    if done.returncode:
        raise UserError(f"{builder}: its HIP compiler does not start: {done.stderr.strip()}")
    return ", ".join(done.stdout.strip().splitlines()[:2])


def _read(builder: str, libraries: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    for name in libraries:
        path = f"/usr/lib/x86_64-linux-gnu/{name}"
        done = subprocess.run(
            [*docker_command(), "run", "--rm", "--network=none", builder, "cat", path],
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise UserError(f"{builder} has no {name}: {done.stderr.decode().strip()}")
        yield name, done.stdout
