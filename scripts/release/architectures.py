"""Whether the compiled code of an image covers the GPUs that its cell promises: pure functions."""

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase

from scripts.matrix.load import Cell
from scripts.matrix.model import targets

# Targets that cover several GPUs: LLVM's AMDGPUUsage.
GENERIC = {"gfx9-4-generic": ("gfx942", "gfx950")}
# A cell's kernels are in these files; one without GPU code at all is for another platform.
REQUIRED = {
    "cuda": ("torch/lib/libtorch_cuda.so", "vllm/_C*"),
    "rocm": ("torch/lib/libtorch_hip.so", "vllm/_C*"),
}


def runs_on(gpu: str, code: Collection[str]) -> bool:
    """Report whether a GPU (``sm_86``, ``gfx942``) can run one of the architectures ``code``.

    A cubin runs on its architecture and on later ones of the same major number; PTX is compiled by the
    driver for any later one. AMD's code runs on its own target alone, or on those of a generic target.
    """
    if gpu.startswith("gfx"):
        return gpu in code or any(gpu in GENERIC.get(name, ()) for name in code)
    number = _number(gpu)
    return any(
        _number(name) <= number and (name.startswith("compute_") or _number(name) // 10 == number // 10)
        for name in code
        if name.startswith(("sm_", "compute_"))
    )


def gaps(cell: Cell, libraries: Mapping[str, Collection[str]]) -> Iterator[str]:
    """Yield a line for each library without code for a promised GPU, and for each unused excuse.

    ``libraries`` are the architectures of each file with GPU code, by its path in site-packages.
    """
    for required in REQUIRED[cell.accelerator.kind]:
        if not any(fnmatchcase(path, required) for path in libraries):
            yield f"{required}: no GPU code at all"
    supported, unused = targets(cell.accelerator), set(cell.without_code)
    for path, code in libraries.items():
        missing = {gpu for gpu in supported if not runs_on(gpu, code)}
        for excuse in cell.without_code:
            if fnmatchcase(path, excuse.library) and missing & set(excuse.architectures or supported):
                missing -= set(excuse.architectures or supported)
                unused.discard(excuse)
        if missing:
            yield (
                f"{path}: no code for {', '.join(sorted(missing))}, only for {', '.join(sorted(code))}; "
                "add the architecture, or its reason to `without_code` of the variant in matrix.yaml"
            )
    for excuse in sorted(unused, key=lambda item: item.library):
        yield f"{excuse.library}: no library needs this `without_code` of matrix.yaml: remove it"


def _number(name: str) -> int:
    return int(name.partition("_")[2])
