"""Compile vLLM's CPU operators, and nothing else of it, into a wheel that owns ``vllm/_C``.

VLLM_SOURCE names vLLM's unpacked source distribution. Its own build asks CMake for torch, which wants a CUDA
toolkit where torch is a CUDA build; torch's own extension builder asks for nothing. The Python part comes
from vLLM's released wheel, so that the cells for CPUs and for GPUs carry the same.
"""

import os
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCES = ("activation", "attention", "cache", "layernorm", "pos_encoding", "pybind")
# vLLM asks for AVX-512, which many machines have not: its operations are done by AVX2, on two registers each.
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
