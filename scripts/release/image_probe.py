"""Print as JSON the GPU architectures of an image's compiled code, by package and by library.

The image's Python runs it inside the image, so it imports no module of this repository and no host tool.
"""

import ctypes
import json
import mmap
import re
import struct
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

# Packages with their own kernels, as the catalogue lists them; torch reports its own architectures.
COMPILED = ("vllm", "vllm_flash_attn", "xformers", "flash_attn")
BESIDE = Path("/opt/rlhf-stack")  # other versions of packages, such as vLLM 0.4.2's NCCL
SHARED = re.compile(r"\.so(\.[0-9]+)*$")
CODE_OBJECTS = (".co", ".hsaco")  # AMD's libraries load these from folders

FATBIN = struct.pack("<I", 0xBA55ED50)
HEADER, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ12xI")
PTX, ELF = 1, 2

BUNDLE, COMPRESSED = b"__CLANG_OFFLOAD_BUNDLE__", b"CCOB"
COUNT, BUNDLED = struct.Struct("<Q"), struct.Struct("<QQQ")
MOST_BUNDLED = 64
TARGET = re.compile(rb"amdgcn-amd-amdhsa-+(gfx[0-9a-f]+(?:-[0-9]+)?(?:-generic)?)")
COMMON = struct.Struct("<4sHH")
METHODS = ZLIB, ZSTD = (0, 1)
# Version, then the size of all in bytes (from 2 on), the uncompressed size, a hash: clang's OffloadBundler.
COMPRESSED_HEADERS = {1: struct.Struct("<4sHHIQ"), 2: struct.Struct("<4sHHIIQ"), 3: struct.Struct("<4sHHQQQ")}
LIBZSTD = "libzstd.so.1"

# e_machine and e_flags of a code object: LLVM's AMDGPUUsage.
CODE_OBJECT = re.compile(rb"\x7fELF\x02\x01.{12}\xe0\x00", re.DOTALL)
MACHINES = {0x30: "gfx908", 0x3F: "gfx90a", 0x4C: "gfx942", 0x4F: "gfx950"}
FLAGS_AT = 48

if TYPE_CHECKING:
    from collections.abc import Iterator

    Content: TypeAlias = bytes | mmap.mmap


class UnreadableError(ValueError):
    """Compiled code that this module cannot read."""


def architectures(content: "Content") -> set[str]:
    """Return the GPU architectures of a shared object: ``sm_80``, ``compute_90`` (PTX), ``gfx90a``.

    CUDA code is in fat binaries: a header, then entries with kind, size and architecture number (``sm_90a``
    is read as ``sm_90``). HIP's is in bundles, which can be compressed, or in code objects, which are ELF.
    """
    found = _of_code_object(content)
    start = content.find(FATBIN)
    while start >= 0:
        if start + HEADER.size <= len(content):
            _, _, header, size = HEADER.unpack_from(content, start)
            end = min(start + header + size, len(content))
            for kind, number, _, _ in entries(content, start + header, end):
                found.add(f"{'sm' if kind == ELF else 'compute'}_{number}")
        start = content.find(FATBIN, start + len(FATBIN))
    start = content.find(BUNDLE)
    while start >= 0:
        found |= _targets(content, start)
        start = content.find(BUNDLE, start + len(BUNDLE))
    start = content.find(COMPRESSED)
    while start >= 0:
        bundle, size = _uncompressed(content, start)
        found |= _targets(bundle, 0)
        start = content.find(COMPRESSED, start + max(size, len(COMPRESSED)))
    return found


def entries(content: "Content | bytearray", start: int, end: int) -> "Iterator[tuple[int, int, int, int]]":
    """Yield kind, architecture, offset and size of the code of each entry of a fat binary."""
    while start + ENTRY.size <= end:
        kind, _, header, size, number = ENTRY.unpack_from(content, start)
        if kind not in (PTX, ELF) or header < ENTRY.size:
            break
        yield kind, number, start + header, size
        start += header + size


def _targets(content: "Content", start: int) -> set[str]:
    """Return the AMD targets of the bundle at ``start``; those without code do not count."""
    found: set[str] = set()
    at = start + len(BUNDLE)
    if content[start:at] != BUNDLE or at + COUNT.size > len(content):
        return found
    (count,) = COUNT.unpack_from(content, at)
    at += COUNT.size
    for _ in range(min(count, MOST_BUNDLED)):
        if at + BUNDLED.size > len(content):
            break
        _, size, length = BUNDLED.unpack_from(content, at)
        at += BUNDLED.size
        if size and (target := TARGET.search(content[at : at + length])):
            found.add(target[1].decode())
        at += length
    return found


def _uncompressed(content: "Content", start: int) -> tuple[bytes, int]:
    """Return the bundle that is compressed at ``start``, and its compressed size in bytes, 0 if unknown."""
    version, method = COMMON.unpack(content[start : start + COMMON.size].ljust(COMMON.size, b"\0"))[1:]
    header = COMPRESSED_HEADERS.get(version)
    if header is None or method not in METHODS or start + header.size > len(content):
        return b"", 0  # four bytes of something else
    *_, size, _ = fields = header.unpack_from(content, start)
    whole = fields[3] if version > 1 else 0
    packed = content[start + header.size : start + whole if whole else len(content)]
    try:
        content = zlib.decompressobj().decompress(packed) if method == ZLIB else _zstd(packed, size)
    except (zlib.error, OSError, MemoryError) as error:
        raise UnreadableError(f"a compressed bundle of HIP code: {error}") from None
    if len(content) != size:
        raise UnreadableError(f"a compressed bundle of HIP code: {len(content)} of {size} bytes")
    return content, whole


def _zstd(packed: bytes, size: int) -> bytes:
    """Decompress with the system's library; Python 3.11 has no module for it."""
    library = ctypes.CDLL(LIBZSTD)
    library.ZSTD_decompress.restype = library.ZSTD_findFrameCompressedSize.restype = ctypes.c_size_t
    frame = library.ZSTD_findFrameCompressedSize(packed, ctypes.c_size_t(len(packed)))
    output = ctypes.create_string_buffer(size)
    done = library.ZSTD_decompress(output, ctypes.c_size_t(size), packed, ctypes.c_size_t(frame))
    return output.raw if done == size else b""


def _of_code_object(content: "Content") -> set[str]:
    if len(content) <= FLAGS_AT or not CODE_OBJECT.match(content):
        return set()
    return {MACHINES.get(content[FLAGS_AT], f"gfx:{content[FLAGS_AT]:#x}")}


def by_number(names: "set[str]") -> "list[str]":
    """Return architectures sorted by kind and number."""
    return sorted(names, key=lambda name: (name.partition("_")[0], len(name), name))


def libraries(site: Path, beside: Path = BESIDE) -> "dict[str, set[str]]":
    """Return the architectures of each file that has GPU code, by its path below ``site`` or from the root.

    Code objects of one folder count as one library, ``folder/*.co``. Raises `UnreadableError` with the path.
    """
    found: dict[str, set[str]] = {}
    for path in (*sorted(site.rglob("*")), *sorted(beside.rglob("*"))):
        name = path.relative_to(site) if path.is_relative_to(site) else path
        if path.is_symlink() or not path.is_file() or not path.stat().st_size:
            continue
        if path.suffix in CODE_OBJECTS:
            name = name.parent / f"*{path.suffix}"
        elif not SHARED.search(path.name):
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                code = architectures(content)
            except UnreadableError as error:
                raise UnreadableError(f"{name}: {error}") from None
        if code:
            found.setdefault(str(name), set()).update(code)
    return found


def main() -> int:
    """Print the JSON object."""
    import torch  # noqa: PLC0415  (available only in the image)

    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: "")() or ""
    carried = {"torch": set(flags.split())}
    of_libraries = libraries(Path(torch.__file__).parent.parent)
    for name, code in of_libraries.items():
        if (package := name.partition("/")[0]) in COMPILED:
            carried.setdefault(package, set()).update(code)
    packages = {name: by_number(found) for name, found in carried.items() if found}
    print(
        json.dumps(
            {
                "packages": packages,
                "libraries": {name: by_number(code) for name, code in of_libraries.items()},
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
