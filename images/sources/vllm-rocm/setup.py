"""Pack the compiled operators of vLLM for ROCm, which ``build`` put next to this file."""

from pathlib import Path

from setuptools import Distribution, setup


class Compiled(Distribution):
    """A distribution for one platform, without an extension that setuptools would build."""

    def has_ext_modules(self) -> bool:
        return True


version = next(
    line.removeprefix("Version: ")
    for line in Path("PKG-INFO").read_text(encoding="utf-8").splitlines()
    if line.startswith("Version: ")
)

setup(
    name="vllm-rocm",
    version=version.partition("+")[0],
    description="vLLM's ROCm operators, compiled from its source distribution",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=["vllm", "amdsmi"],
    package_data={"": ["*.so"]},
    distclass=Compiled,
)
