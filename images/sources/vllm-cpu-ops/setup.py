"""Compile only vLLM's CPU operators, into a wheel that owns ``vllm/_C``.

VLLM_SOURCE is the folder of vLLM's unpacked source distribution. Its own build finds torch with CMake, which
requires a CUDA toolkit if torch is a CUDA build; torch's own extension builder does not. The Python code
comes from vLLM's released wheel, so that CPU and GPU cells have the same.
"""

import os
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCES = ("activation", "attention", "cache", "layernorm", "pos_encoding", "pybind")
# vLLM requires AVX-512, which many machines lack: AVX2 executes its operations on two registers each.
HALVES = Path(__file__).with_name("two_halves.hpp")
MACHINE = ("-march=x86-64-v3", "-mtune=generic", "-include", str(HALVES.resolve()))

source = Path(os.environ["VLLM_SOURCE"]).resolve()
version = next(
    line.removeprefix("Version: ")
    for line in (source / "PKG-INFO").read_text(encoding="utf-8").splitlines()
    if line.startswith("Version: ")
)

setup(
    name="vllm-cpu-ops",
    version=version.partition("+")[0],
    description="vLLM's CPU operators, compiled from its source distribution",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=[],
    ext_modules=[
        CppExtension(
            "vllm._C",
            [str(source / "csrc" / "cpu" / f"{name}.cpp") for name in SOURCES],
            include_dirs=[str(source / "csrc")],
            extra_compile_args=["-O2", "-g0", "-fopenmp", "-DVLLM_CPU_EXTENSION", *MACHINE],
            extra_link_args=["-fopenmp"],
        )
    ],
    # ``_C.so``: the name of the CUDA operators, which are removed, has the suffix of the interpreter in it.
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
