"""The bytes of every bucket as of the last sync, which a node keeps to send or receive changed elements."""

import mmap
import os
from collections.abc import Sequence
from itertools import accumulate

from rlhf_stack.lazy import torch
from rlhf_stack.sync.buckets import ALIGNMENT, Bucket

ANONYMOUS = -1  # instead of a file


class Kept:
    """Memory of a node for all buckets, in a ``file`` (memfd) that its ranks have open, or of one rank alone.

    It is the size of the model, in host memory. One rank, the ``owner``, writes and frees it.
    """

    def __init__(self, file: int = ANONYMOUS, owner: bool = True) -> None:
        self._file, self._owner = file, owner
        self._starts: list[int] = []
        self._memory: mmap.mmap | None = None

    def holds(self, buckets: Sequence[Bucket]) -> bool:
        """Report whether there is memory for ``buckets``."""
        return self._memory is not None and self._starts == _starts(buckets)

    def keep(self, buckets: Sequence[Bucket]) -> None:
        """Map memory for ``buckets``, unless this rank has."""
        if self.holds(buckets):
            return
        self.release()
        self._starts = _starts(buckets)
        size = max(1, self._starts[-1])
        if self._file != ANONYMOUS:
            os.posix_fallocate(self._file, 0, size)  # never shrinks it, so ranks may call it in any order
        self._memory = mmap.mmap(self._file, size)

    def for_bucket(self, size: int, number: int) -> "torch.Tensor":
        """Return the ``size`` bytes (uint8) of bucket ``number``."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=self._starts[number])

    def release(self) -> None:
        """Unmap the memory; its owner frees it."""
        if self._memory is not None and self._owner and self._file != ANONYMOUS:
            self._memory.madvise(mmap.MADV_REMOVE)
        self._memory = None

    def close(self) -> None:
        """Release the memory, and close the file; it cannot be used again."""
        self.release()
        if self._file != ANONYMOUS:
            os.close(self._file)
            self._file = ANONYMOUS


def _starts(buckets: Sequence[Bucket]) -> list[int]:
    """Return the first byte of each bucket, and the end of the last one."""
    return [0, *accumulate(-(-bucket.size // ALIGNMENT) * ALIGNMENT for bucket in buckets)]
