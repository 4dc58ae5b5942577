"""Reads the version and the build id of an NCCL or RCCL file without loading it."""

import mmap
import re
import struct
from pathlib import Path

VERSION = re.compile(rb"\b[NR]CCL version (\d+\.\d+\.\d+[^\s\x00]*)")
NOTE, BUILD_ID = 4, 3  # of an ELF: the type of a segment, and of a note
HEADER = struct.Struct("<16xHHIQQQIHHH")
SEGMENT = struct.Struct("<IIQQQQQQ")


def version(path: Path) -> str:
    """The version string in a library, such as "2.20.5+cuda12.4"; "" if it has none."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = VERSION.search(content)
        return found[1].decode(errors="replace") if found else ""


def build_id(path: Path) -> str:
    """The build id of a 64-bit ELF file in hex; "" if it has none or is not such a file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[:5] != b"\x7fELF\x02" or len(content) < HEADER.size:
            return ""
        _, _, _, _, table, _, _, _, size, count = HEADER.unpack_from(content)
        for number in range(count):
            start = table + number * size
            if start + SEGMENT.size > len(content):
                break
            kind, _, offset, _, _, length, _, _ = SEGMENT.unpack_from(content, start)
            found = note_of(content[offset : offset + length]) if kind == NOTE else ""
            if found:
                return found
    return ""


def note_of(notes: bytes) -> str:
    """The build id in the notes of an ELF file in hex, or ""."""
    position = 0
    while position + 12 <= len(notes):
        name, description, kind = struct.unpack_from("<III", notes, position)
        start = position + 12 + (name + 3) // 4 * 4
        if kind == BUILD_ID and notes[position + 12 : position + 15] == b"GNU":
            return notes[start : start + description].hex()
        position = start + (description + 3) // 4 * 4
    return ""
