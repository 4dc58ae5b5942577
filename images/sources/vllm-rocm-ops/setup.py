"""Compile only vLLM's operators for ROCm, into a wheel that owns ``vllm/_C``.

It runs inside vLLM's unpacked source distribution, because torch translates the CUDA sources below the
working directory to HIP. PYTORCH_ROCM_ARCH names the GPUs. The Python code comes from vLLM's released
wheel, so that CPU and GPU cells have the same. AMD's compiler never ran this recipe, Debian's HIP does
(`nox -s hip`).
"""

import re
import subprocess
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CUDAExtension

TORCH_LIBRARIES = Path(torch.__file__).parent / "lib"

# The files that vLLM's CMakeLists.txt compiles for HIP.
LISTED = Path("CMakeLists.txt").read_text(encoding="utf-8").partition("set(VLLM_EXT_SRC")[2]
SOURCES = re.findall(r'"([^"]+)"', LISTED.partition(")")[0])
# The flags for HIP of CMakeLists.txt and cmake/utils.cmake of vLLM 0.4.2.
FLAGS = (
    "-DUSE_ROCM",
    "-DENABLE_FP8_E4M3",
    "-U__HIP_NO_HALF_CONVERSIONS__",
    "-U__HIP_NO_HALF_OPERATORS__",
    "-fno-gpu-rdc",
)


def use_file_names(extension: Path, folder: Path = TORCH_LIBRARIES) -> None:
    """Let ``extension`` require ROCm's libraries by their file names in torch's ``folder``.

    Linked with AMD's files it requires ``libamdhip64.so.6``; torch's wheel has the same library, with that
    SONAME, as ``libamdhip64.so``, so a search for the SONAME in torch's folder finds nothing.
    """
    listed = subprocess.run(
        ["patchelf", "--print-needed", extension], check=True, capture_output=True, text=True
    )
    for name in listed.stdout.split():
        file = name.partition(".so")[0] + ".so"
        if not (folder / name).exists() and (folder / file).exists():
            subprocess.run(["patchelf", "--replace-needed", name, file, extension], check=True)


class BuildOperators(BuildExtension):
    """Build the extension for the libraries of torch's wheel, not for those of AMD's image."""

    def build_extensions(self) -> None:
        super().build_extensions()
        for extension in self.extensions:
            use_file_names(Path(self.get_ext_fullpath(extension.name)))


version = next(
    line.removeprefix("Version: ")
    for line in Path("PKG-INFO").read_text(encoding="utf-8").splitlines()
    if line.startswith("Version: ")
)

setup(
    name="vllm-rocm-ops",
    version=version.partition("+")[0],
    description="vLLM's ROCm operators, compiled from its source distribution",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[],
    ext_modules=[
        CUDAExtension(
            "vllm._C",
            SOURCES,
            include_dirs=[str(Path("csrc").resolve())],
            libraries=["hipblas"],  # gptq/q_gemm.cu calls hipblasHgemm
            extra_link_args=["-Wl,-rpath,$ORIGIN/../torch/lib"],
            extra_compile_args={"cxx": ["-O2", "-g0", "-DUSE_ROCM"], "nvcc": ["-O2", *FLAGS]},
        )
    ],
    # ``_C.so``: the name of the CUDA operators, which are removed, has the suffix of the interpreter in it.
    cmdclass={"build_ext": BuildOperators.with_options(no_python_abi_suffix=True)},
)
