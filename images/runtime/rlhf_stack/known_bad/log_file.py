"""Reads the end of a log in bounded memory: a file or a stream, in UTF-8 or UTF-16."""

import codecs
import io
import re
from collections import deque
from dataclasses import dataclass
from typing import BinaryIO

from rlhf_stack.errors import UserError

MAX_BYTES = 8 << 20
CHUNK = 1 << 20
MAX_LINE = 2000
LONG_LINE = re.compile(rf"[^\n]{{{MAX_LINE + 1},}}")
MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}
COMPRESSED = {b"\x1f\x8b": "zcat", b"\x28\xb5\x2f\xfd": "zstdcat", b"BZh": "bzcat", b"\xfd7zXZ": "xzcat"}
BINARY_FRACTION = 0.1  # of NUL bytes; a log that several processes write may have a few
# Of characters that are none in UTF-8; a log in another encoding of letters may have many.
UNREADABLE, UNREADABLE_FRACTION = re.compile("[\ufffd\x00-\x07\x0e-\x1a]"), 0.3


@dataclass(frozen=True)
class LogText:
    """The text of a log, with long lines cut in their middle; ``complete`` unless it is only its end."""

    text: str
    complete: bool


def read_log(file: BinaryIO, name: str) -> LogText:
    """Read at most the last `MAX_BYTES` of ``file``; `UserError` if it is compressed, binary or empty."""
    try:
        start, data, complete = _head_and_tail(file)
    except OSError as error:
        raise UserError(f"{name}: {error.strerror}") from None
    for magic, command in COMPRESSED.items():
        if start.startswith(magic):
            raise UserError(f"{name} is compressed: `{command} {name} | rlhf-stack doctor --log -`")
    text = data.decode(_encoding(start, data), errors="replace").lstrip("\ufeff")
    unreadable = len(UNREADABLE.findall(text))
    if text.count("\0") > BINARY_FRACTION * len(text) or unreadable > UNREADABLE_FRACTION * len(text):
        raise UserError(f"{name} is not a text file")
    if not text.strip():
        raise UserError(f"{name} is empty")
    text = text.replace("\r\n", "\n")
    if not complete:
        text = text.partition("\n")[2] or text  # the first line is cut
    return LogText(LONG_LINE.sub(_shortened, text), complete)


def _head_and_tail(file: BinaryIO) -> tuple[bytes, bytes, bool]:
    """The first bytes of the file, its last `MAX_BYTES`, and whether these are all of it."""
    start = file.read(4)
    if file.seekable():
        size = file.seek(0, io.SEEK_END)
        file.seek(max(0, size - MAX_BYTES) & ~1)  # the units of UTF-16 have two bytes
        return start, file.read(MAX_BYTES + 1), size <= MAX_BYTES
    chunks, size, total = deque([start]), len(start), len(start)
    while chunk := file.read(CHUNK):
        chunks.append(chunk)
        size, total = size + len(chunk), total + len(chunk)
        while size - len(chunks[0]) >= MAX_BYTES:
            size -= len(chunks.popleft())
    skipped = total - min(total, MAX_BYTES)
    return start, b"".join(chunks)[-(total - (skipped & ~1)) :], skipped == 0


def _encoding(start: bytes, data: bytes) -> str:
    if start[:2] in MARKS:
        return MARKS[start[:2]]
    for first, name in ((1, "utf-16-le"), (0, "utf-16-be")):  # most characters of a log are ASCII
        halves = data[first:CHUNK:2]
        if halves.count(0) > len(halves) / 2:
            return name
    return "utf-8"


def _shortened(line: re.Match[str]) -> str:
    return f"{line[0][: MAX_LINE // 2]} ... {line[0][-MAX_LINE // 2 :]}"
