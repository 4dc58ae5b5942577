"""Changed elements of a bucket: which ones differ from the bytes that every node keeps, and their new bits.

Elements are compared as integers, so every dtype, NaN and the sign of zero are exact. A message is a head,
the new elements, and the gaps between them. A gap is the number of unchanged elements before a changed one,
in one byte; `SKIP` stands for so many unchanged elements and no changed one. If that is not smaller than the
bucket, the message has all bytes of the bucket and no gaps.
"""

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Indices = NDArray[np.int64]

HEAD = struct.Struct("<QQQ")  # bytes of the next message, width of an element, elements
WIDEST = 8  # bytes: wider elements are compared in parts
SKIP = 255


def changes(kept: "Bytes", parts: "Iterable[tuple[int, Bytes]]", width: int) -> "Bytes":
    """Write ``parts`` of a bucket (first byte, bytes) into ``kept``; return the message that does the same.

    Elements have ``width`` bytes, which divide the first byte and the size of each part.
    """
    import numpy as np

    old = _elements(kept, width)
    positions, values = [], []
    for begin, part in parts:
        new, first = _elements(part, width), begin // width
        found = np.flatnonzero(old[first : first + len(new)] != new)
        values.append(new[found])
        positions.append(found + first)
        old[positions[-1]] = values[-1]
    gaps = _gaps(np.concatenate(positions) if positions else np.zeros(0, np.int64))
    count = sum(map(len, values))
    content = [value.view(np.uint8) for value in values] + [gaps]
    if count * width + len(gaps) >= len(kept):
        count, content = len(old), [kept]
    return np.concatenate([np.frombuffer(HEAD.pack(0, width, count), np.uint8), *content])


def apply(message: "Bytes", kept: "Bytes") -> None:
    """Write the changes of ``message`` into the bucket ``kept``."""
    _, width, count = HEAD.unpack_from(message.data)
    end = HEAD.size + count * width
    values, gaps = _elements(message[HEAD.size : end], width), message[end:]
    target = _elements(kept, width)
    if len(gaps):
        target[_positions(gaps)] = values
    elif count:
        target[:] = values


def head() -> "Bytes":
    """Return a message without elements: the first one, whose head has the size of the second."""
    import numpy as np

    return np.frombuffer(HEAD.pack(0, 1, 0), np.uint8).copy()


def announce(message: "Bytes", following: "Bytes") -> None:
    """Write the size of the ``following`` message into ``message``."""
    import numpy as np

    message[:8] = np.frombuffer(struct.pack("<Q", len(following)), np.uint8)


def next_size(message: "Bytes") -> int:
    """Return the bytes of the message after ``message``."""
    return int(HEAD.unpack_from(message.data)[0])


def _elements(content: "Bytes", width: int) -> "NDArray[np.uint8]":
    """Return bytes as unsigned integers of ``width`` bytes."""
    return content.view(f"u{width}")


def _gaps(positions: "Indices") -> "Bytes":
    """Return the gaps before ascending ``positions``."""
    import numpy as np

    skips, rests = np.divmod(np.diff(positions, prepend=-1) - 1, SKIP)
    gaps = np.full(len(positions) + int(skips.sum()), SKIP, np.uint8)
    gaps[np.cumsum(skips) + np.arange(len(positions))] = rests
    return gaps


def _positions(gaps: "Bytes") -> "Indices":
    """Return the positions with ``gaps`` before them."""
    import numpy as np

    ends = np.flatnonzero(gaps != SKIP)
    positions: Indices = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))
    return positions
