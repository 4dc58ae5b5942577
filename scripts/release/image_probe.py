"""Print as JSON the GPU architectures of an image's compiled code, by package.

The image's Python runs it inside the image, so it imports no module of this repository and no host tool.
"""

import json
import mmap
import re
import struct
import sys
from pathlib import Path

# Packages with their own kernels; torch reports its own architectures.
COMPILED = ("vllm", "vllm_flash_attn", "xformers", "flash_attn")
FATBIN = struct.pack("<I", 0xBA55ED50)
HEADER, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ12xI")
PTX, ELF = 1, 2
HIP = re.compile(rb"amdgcn-amd-amdhsa--(gfx[0-9a-f]+)")


def architectures(content: "bytes | mmap.mmap") -> set[str]:
    """Return the GPU architectures of a shared object: ``sm_80``, ``compute_90`` (PTX), ``gfx90a``.

    CUDA code is in fat binaries: a header, then entries with kind, size and architecture number (``sm_90a``
    is read as ``sm_90``). HIP names the target of each bundle.
    """
    found = {match[1].decode() for match in HIP.finditer(content)}
    start = content.find(FATBIN)
    while start >= 0:
        if start + HEADER.size <= len(content):
            _, _, header, size = HEADER.unpack_from(content, start)
            found |= _entries(content, start + header, min(start + header + size, len(content)))
        start = content.find(FATBIN, start + len(FATBIN))
    return found


def _entries(content: "bytes | mmap.mmap", start: int, end: int) -> set[str]:
    found = set()
    while start + ENTRY.size <= end:
        kind, _, header, size, number = ENTRY.unpack_from(content, start)
        if kind not in (PTX, ELF) or header < ENTRY.size:
            break
        found.add(f"{'sm' if kind == ELF else 'compute'}_{number}")
        start += header + size
    return found


def by_number(names: "set[str]") -> "list[str]":
    """Return architectures sorted by kind and number."""
    return sorted(names, key=lambda name: (name.partition("_")[0], len(name), name))


def compiled_for(package: Path) -> "list[str]":
    """Return the architectures of all shared objects of an installed package."""
    found: set[str] = set()
    for path in sorted(package.rglob("*.so")):
        if path.stat().st_size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                found |= architectures(content)
    return by_number(found)


def main() -> int:
    """Print the JSON object."""
    import torch  # noqa: PLC0415  (available only in the image)

    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: "")() or ""
    carried = {"torch": by_number(set(flags.split()))}
    site = Path(torch.__file__).parent.parent
    carried |= {name: compiled_for(site / name) for name in COMPILED if (site / name).is_dir()}
    print(json.dumps({name: found for name, found in carried.items() if found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
