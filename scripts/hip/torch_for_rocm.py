"""Lay out what a build against torch for ROCm needs, from torch's CUDA wheel of the same version.

Runs in the root of a toolchain, as ``python3 torch_for_rocm.py WHEEL VERSION RELEASE OUT``. The headers are
translated by the hipify in the wheel, as torch's ``tools/amd_build/build_amd.py`` does. Libraries have the
symbols of the CUDA wheel's under their names in HIP, without any code: an extension can be linked with them.
"""

import importlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Where hipify's rules expect the folders of `torch/include`.
SOURCE_TREE = {
    "ATen": "aten/src/ATen",
    "c10": "c10",
    "torch": "torch",
    "caffe2": "caffe2",
    "THC": "aten/src/THC",
}
TRANSLATED = (
    "caffe2/*",
    "aten/src/THC/*",
    "aten/src/ATen/cuda/*",
    "aten/src/ATen/native/cuda/*",
    "aten/src/ATen/native/cudnn/*",
    "aten/src/ATen/native/nested/cuda/*",
    "aten/src/ATen/native/sparse/cuda/*",
    "aten/src/ATen/native/quantized/cuda/*",
    "aten/src/ATen/native/transformers/cuda/*",
    "aten/src/ATen/cudnn/*",
    "c10/cuda/*",
    "c10/cuda/impl/*",
    "torch/*",
)
PYTHON = (
    "_appdirs.py",
    "_vendor/",
    "torch_version.py",
    "utils/_cpp_extension_versioner.py",
    "utils/cpp_extension.py",
    "utils/file_baton.py",
    "utils/hipify/",
)
# The SONAME of each library, by the name of its file in torch's wheel for ROCm.
LIBRARIES = {
    "libc10.so": "libc10.so",
    "libtorch.so": "libtorch.so",
    "libtorch_cpu.so": "libtorch_cpu.so",
    "libtorch_python.so": "libtorch_python.so",
    "libc10_hip.so": "libc10_hip.so",
    "libtorch_hip.so": "libtorch_hip.so",
    "libamdhip64.so": "libamdhip64.so.6",
    "libhipblas.so": "libhipblas.so.2",
}
OF_ROCM_7 = {"libamdhip64.so": "libamdhip64.so.7", "libhipblas.so": "libhipblas.so.3"}
OF_CUDA = {"libc10_hip.so": "libc10_cuda.so", "libtorch_hip.so": "libtorch_cuda.so"}
HIP, HIPBLAS = Path("/opt/rocm/lib/libamdhip64.so"), Path("/opt/rocm/include/hipblas/hipblas.h")
# Declared by ATen/hip/impl/HIPCachingAllocatorMasqueradingAsCUDA.h, which torch for CUDA does not compile.
MASQUERADING = (
    "_ZN3c103hip37HIPCachingAllocatorMasqueradingAsCUDA30recordStreamMasqueradingAsCUDA"
    "ERKNS_7DataPtrENS0_27HIPStreamMasqueradingAsCUDAE"
)
MODULE = '''"""What extension builders read of torch; nothing of it can be executed."""

import types

from . import version
from .torch_version import __version__

_C = types.SimpleNamespace(
    _GLIBCXX_USE_CXX11_ABI=False,
    _PYBIND11_COMPILER_TYPE="_gcc",
    _PYBIND11_STDLIB="_libstdcpp",
    _PYBIND11_BUILD_ABI="_cxxabi1011",
)
cuda = types.SimpleNamespace(is_available=lambda: False, _is_compiled=lambda: True)
backends = types.SimpleNamespace(
    cudnn=types.SimpleNamespace(enabled=False), mps=types.SimpleNamespace(is_built=lambda: False)
)


def compiled_with_cxx11_abi():
    return _C._GLIBCXX_USE_CXX11_ABI
'''
OF_TORCH_2_12 = """

xpu = types.SimpleNamespace(_is_compiled=lambda: False)
from . import utils
"""
# The recipe for ROCm 7 runs CMake. Torch's own file requires the CMake files of ROCm's libraries. The options
# that torch itself is compiled with are those of its users too, such as the version, hipify's CUDA_VERSION.
CMAKE = """get_filename_component(TORCH_INSTALL_PREFIX "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
set(headers ${TORCH_INSTALL_PREFIX}/include)
set(TORCH_INCLUDE_DIRS ${headers} ${headers}/torch/csrc/api/include)
add_library(torch INTERFACE IMPORTED)
target_include_directories(torch INTERFACE ${TORCH_INCLUDE_DIRS} /opt/rocm/include)
target_compile_definitions(torch INTERFACE USE_ROCM __HIP_PLATFORM_AMD__=1 TORCH_HIP_VERSION=@VERSION@)
set(TORCH_LIBRARIES torch)
foreach(name c10 torch_cpu torch c10_hip torch_hip)
  list(APPEND TORCH_LIBRARIES ${TORCH_INSTALL_PREFIX}/lib/lib${name}.so)
endforeach()
set(PYTORCH_FOUND_HIP TRUE)
"""
VERSION = """set(PACKAGE_VERSION "{}")
set(PACKAGE_VERSION_COMPATIBLE TRUE)
"""


def main(wheel: Path, version: str, release: str, out: Path) -> None:
    """Write the package ``torch`` of ``version`` for the ROCm ``release`` to ``out``."""
    torch = out / "torch"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with zipfile.ZipFile(wheel) as archive:
            wanted = ("torch/include/", *(f"torch/{name}" for name in PYTHON))
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(wanted)])
        released = folder / "torch"
        for name in PYTHON:
            source, target = released / name, torch / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, target)
        shutil.copytree(released / "include", torch / "include")
        translate(released, folder / "source", torch / "include")
    libraries, prefix, module = LIBRARIES, "", MODULE
    if release.startswith("7"):
        module += OF_TORCH_2_12
        libraries, prefix = LIBRARIES | OF_ROCM_7, "/opt/venv/lib/python3.11/site-packages/torch/share/cmake"
        config = torch / "share" / "cmake" / "Torch"
        config.mkdir(parents=True)
        major, minor = map(int, release.split(".")[:2])
        text = CMAKE.replace("@VERSION@", str(100 * major + minor))
        (config / "TorchConfig.cmake").write_text(text, encoding="utf-8")
        short = VERSION.format(version.partition("+")[0])
        (config / "TorchConfigVersion.cmake").write_text(short, encoding="utf-8")
    (torch / "__init__.py").write_text(module, encoding="utf-8")
    (torch / "utils" / "__init__.py").write_text(f'cmake_prefix_path = "{prefix}"\n', encoding="utf-8")
    (torch / "version.py").write_text(
        f'__version__ = "{version}"\ndebug = False\ncuda = None\ngit_version = ""\nhip = "{release}"\n',
        encoding="utf-8",
    )
    (torch / "lib").mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for name, soname in libraries.items():
            link(torch / "lib" / name, soname, defined(archive, name))


def defined(released: zipfile.ZipFile, name: str) -> set[str]:
    """Return the symbols that a library of torch for ROCm defines."""
    symbols = importlib.import_module("symbols")  # next to this file
    if name == "libhipblas.so":
        return set(re.findall(r"\bhipblas[A-Z]\w+(?=\()", HIPBLAS.read_text(encoding="utf-8")))
    if name == "libamdhip64.so":
        return set(symbols.read(HIP.read_bytes()).defined)
    found = symbols.read(released.read(f"torch/lib/{OF_CUDA.get(name, name)}")).defined
    if name == "libc10_hip.so":
        return set(map(symbols.of_hip, found))
    return {*found, MASQUERADING} if name == "libtorch_hip.so" else set(found)


def link(library: Path, soname: str, names: set[str]) -> None:
    """Write a library that defines ``names``, without any code."""
    lines = (f'.globl "{name}"\n.type "{name}", @function\n"{name}":\n' for name in sorted(names))
    command = ["gcc", "-shared", "-nostdlib", "-x", "assembler", "-", f"-Wl,-soname,{soname}", f"-o{library}"]
    subprocess.run(command, input=f".text\n{''.join(lines)}ret\n", text=True, check=True)


def translate(released: Path, project: Path, include: Path) -> None:
    """Add the headers for ROCm to ``include``: those of the wheel, translated in torch's source layout."""
    present = {ours: theirs for ours, theirs in SOURCE_TREE.items() if (released / "include" / ours).exists()}
    for ours, theirs in present.items():
        shutil.copytree(released / "include" / ours, project / theirs)
    sys.path.insert(0, str(released / "utils"))
    importlib.import_module("hipify.hipify_python").hipify(
        project_directory=str(project),
        output_directory=str(project),
        includes=[str(project / pattern) for pattern in TRANSLATED],
        ignores=["*/ATen/core/*"],
        hip_clang_launch=True,
        is_pytorch_extension=False,
        show_progress=False,
    )
    for ours, theirs in present.items():
        shutil.copytree(project / theirs, include / ours, dirs_exist_ok=True)
    if (project / "aten/src/THH").exists():  # hipify's name of THC
        shutil.copytree(project / "aten/src/THH", include / "THH", dirs_exist_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
