"""What the compiler recorded about the HIP kernels of a library: registers spilled, memory used.

Read from the metadata notes of AMD's code objects, so neither a GPU nor ROCm's tools are needed.
"""

import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec

from scripts.errors import UserError
from scripts.release.image_probe import (
    CODE_OBJECT,
    COMPRESSED,
    FLAGS_AT,
    MACHINES,
    SHARED,
    UnreadableError,
    _uncompressed,
)

LDS_BYTES = 64 * 1024  # of a workgroup, on every GPU of the ROCm cells
DAMAGED = (
    *(UnreadableError, zipfile.BadZipFile, zlib.error, EOFError),
    *(struct.error, msgspec.MsgspecError, KeyError),
)

# ELF: where the section headers are, and their fields that are needed here.
SECTIONS_AT, SECTION_COUNT_AT = 40, 58
SECTION = struct.Struct("<4xI16xQQ24x")  # type, offset, size
NOTE_SECTION = 7
# A note: sizes of name and description in bytes, type; LLVM's AMDGPUUsage has the metadata in MessagePack.
NOTE = struct.Struct("<III")
OWNER, METADATA = b"AMDGPU\0", 32


class Kernel(msgspec.Struct, frozen=True, order=True):
    """One kernel for one architecture; sizes in bytes, spills in registers."""

    name: str
    architecture: str
    lds: int
    scratch: int
    vgpr_spills: int
    sgpr_spills: int


def read(path: Path) -> dict[str, list[Kernel]]:
    """Return the kernels of a wheel's shared objects, or of one shared or code object, by file name.

    Files without kernels are left out. Raises `UserError` for a file that cannot be read.
    """
    try:
        found = {name: sorted(kernels(content)) for name, content in _contents(path)}
    except DAMAGED as error:
        raise UserError(f"{path}: damaged: {error}") from None
    return {name: code for name, code in found.items() if code}


def kernels(content: bytes) -> Iterator[Kernel]:
    """Yield the kernels of all code objects in ``content``."""
    for architecture, _, metadata in code_objects(content):
        for item in metadata.get("amdhsa.kernels", ()):
            yield Kernel(
                name=item[".name"],
                architecture=architecture,
                lds=item[".group_segment_fixed_size"],
                scratch=item[".private_segment_fixed_size"],
                vgpr_spills=item.get(".vgpr_spill_count", 0),
                sgpr_spills=item.get(".sgpr_spill_count", 0),
            )


def code_objects(content: bytes) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """Yield architecture, bytes and metadata of each code object in ``content``, in bundles or not."""
    for start in (match.start() for match in CODE_OBJECT.finditer(content)):
        view = memoryview(content)[start:]
        (at,) = struct.unpack_from("<Q", view, SECTIONS_AT)
        size, count = struct.unpack_from("<HH", view, SECTION_COUNT_AT)
        yield _architecture(view), bytes(view[: at + size * count]), _metadata(view)
    start = content.find(COMPRESSED)
    while start >= 0:
        bundle, size = _uncompressed(content, start)
        yield from code_objects(bundle)
        start = content.find(COMPRESSED, start + max(size, len(COMPRESSED)))


def problems(found: Collection[Kernel], architectures: Collection[str]) -> Iterator[str]:
    """Yield a line for each kernel that lacks one of ``architectures`` or needs more LDS than a GPU has."""
    compiled: dict[str, set[str]] = {}
    for kernel in found:
        compiled.setdefault(kernel.name, set()).add(kernel.architecture)
        if kernel.lds > LDS_BYTES:
            yield f"{kernel.name}: {kernel.lds} bytes of LDS on {kernel.architecture}, at most {LDS_BYTES}"
    for name, code in sorted(compiled.items()):
        if missing := sorted(set(architectures) - code):
            yield f"{name}: not compiled for {', '.join(missing)}"


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
    if path.suffix != ".whl":
        yield path.name, path.read_bytes()
        return
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            if SHARED.search(name):
                yield name, wheel.read(name)


def _architecture(content: memoryview) -> str:
    return MACHINES.get(content[FLAGS_AT], f"gfx:{content[FLAGS_AT]:#x}")


def _metadata(content: memoryview) -> dict[str, Any]:
    (at,) = struct.unpack_from("<Q", content, SECTIONS_AT)
    size, count = struct.unpack_from("<HH", content, SECTION_COUNT_AT)
    for number in range(count):
        kind, start, length = SECTION.unpack_from(content, at + number * size)
        if kind != NOTE_SECTION:
            continue
        end = start + length
        while start < end:
            owner, described, kind = NOTE.unpack_from(content, start)
            name = start + NOTE.size
            body = name + _aligned(owner)
            if (bytes(content[name : name + owner]), kind) == (OWNER, METADATA):
                return msgspec.msgpack.decode(content[body : body + described], type=dict[str, Any])
            start = body + _aligned(described)
    return {}


def _aligned(size: int) -> int:
    return (size + 3) & ~3
