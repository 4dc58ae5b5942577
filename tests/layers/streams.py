"""The chunks of bytes that Docker sends, as a file."""

import io
from collections.abc import Iterable


class Stream(io.RawIOBase):
    """Chunks of bytes as a readable file."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks, self._rest = iter(chunks), b""

    def readable(self) -> bool:
        """Return that it is readable."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill ``buffer`` from the current chunk, and return with how many bytes."""
        self._rest = self._rest or next(self._chunks, b"")
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count
