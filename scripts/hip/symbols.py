"""Dynamic symbols of shared objects: what they define, and what they need. Python's own modules alone."""

import re
import struct
from dataclasses import dataclass

SECTIONS_AT, SECTION_SIZES_AT = 40, 58
SECTION, SYMBOL, ENTRY = struct.Struct("<IIQQQQII"), struct.Struct("<IBBHQQ"), struct.Struct("<qQ")
DYNAMIC, DYNAMIC_SYMBOLS = 6, 11
NEEDED, WEAK = 1, 2
IDENTIFIER = re.compile(r"[1-9][0-9]*")
# How HIP's names follow from CUDA's: torch's hipify, and its names of streams.
TWINS = (("ihipStream_t", "CUstream_st"), ("ihipEvent_t", "CUevent_st"), ("HIP", "CUDA"), ("hip", "cuda"))


@dataclass(frozen=True)
class Symbols:
    """The dynamic symbols of a shared object, by their mangled names, and the libraries that it requires."""

    defined: frozenset[str]
    undefined: frozenset[str]
    needed: tuple[str, ...]


def read(content: bytes) -> Symbols:
    """Read a 64-bit ELF file; weak references, which may stay undefined, do not count."""
    (at,) = struct.unpack_from("<Q", content, SECTIONS_AT)
    size, count = struct.unpack_from("<HH", content, SECTION_SIZES_AT)
    tables = [SECTION.unpack_from(content, at + number * size) for number in range(count)]
    defined, undefined, needed = set(), set(), []
    for _, kind, _, _, start, length, link, _ in tables:
        if kind == DYNAMIC_SYMBOLS:
            for name, info, _, section, _, _ in SYMBOL.iter_unpack(content[start : start + length]):
                if text := _text(content, tables[link][4] + name):
                    if section:
                        defined.add(text)
                    elif info >> 4 != WEAK:
                        undefined.add(text)
        elif kind == DYNAMIC:
            entries = ENTRY.iter_unpack(content[start : start + length])
            needed += [_text(content, tables[link][4] + value) for tag, value in entries if tag == NEEDED]
    return Symbols(frozenset(defined), frozenset(undefined), tuple(needed))


def of_cuda(mangled: str) -> str:
    """Return the mangled name that a symbol of torch for ROCm has in torch for CUDA."""
    return _renamed(mangled, TWINS)


def of_hip(mangled: str) -> str:
    """Return the mangled name that a symbol of torch for CUDA has in torch for ROCm."""
    return _renamed(mangled, tuple((theirs, ours) for ours, theirs in TWINS))


def _renamed(mangled: str, names: tuple[tuple[str, str], ...]) -> str:
    parts, at = [], 0
    while at < len(mangled):
        number = IDENTIFIER.match(mangled, at)
        if number is None:
            parts.append(mangled[at])
            at += 1
            continue
        at = number.end() + int(number[0])
        name = mangled[number.end() : at]
        for old, new in names:
            name = name.replace(old, new)
        parts.append(f"{len(name)}{name}")
    return "".join(parts)


def _text(content: bytes, at: int) -> str:
    return content[at : content.index(b"\0", at)].decode()
