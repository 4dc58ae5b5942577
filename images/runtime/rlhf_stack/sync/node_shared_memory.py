"""Memory shared by the ranks of a node: weights enter the node once, and every rank loads them from there."""

import json
import mmap
import os
import secrets
import time
from collections.abc import Sequence

from rlhf_stack.config import env_vars
from rlhf_stack.lazy import torch
from rlhf_stack.sync.group import SLOTS, Buffers
from rlhf_stack.sync.kept import Kept
from rlhf_stack.sync.membership import Members

TOKEN_BYTES = 16


class SharedBuffers(Buffers):
    """The buffers of a node, in memory ``files`` (memfd) that all of its ranks have open.

    One rank, the ``owner``, frees the memory: its transfers end when all other ranks have read it.
    """

    def __init__(self, files: Sequence[int], owner: bool) -> None:
        super().__init__("cpu", pinned=False)
        self._files, self._owner = list(files), owner
        self._mapped: dict[int, mmap.mmap] = {}

    def release(self) -> None:
        """Unmap the memory; the owner also frees it, and the files keep their size for other ranks."""
        for memory in self._mapped.values():
            if self._owner:
                memory.madvise(mmap.MADV_REMOVE)
        self._mapped.clear()
        super().release()

    def close(self) -> None:
        """Also close this process's files: a run whose sync group is formed again would collect them."""
        super().close()
        while self._files:
            os.close(self._files.pop())

    def _new(self, size: int, index: int) -> "torch.Tensor":
        os.posix_fallocate(
            self._files[index], 0, size
        )  # never shrinks the file, so ranks may call it in any order
        self._mapped[index] = mmap.mmap(self._files[index], size)
        return torch.frombuffer(self._mapped[index], dtype=torch.uint8)


def share_node_buffers(members: Members) -> tuple[list[int], Buffers | None, Kept]:
    """Return the leader of each rank's node, by rank, this rank's shared buffers (None: it shares none),
    and what it keeps, which the ranks of a node share too.

    The first rank at an address offers its memory to the other ranks there. A rank that cannot open it (in
    another container of the same host, or of another user) is its own leader.
    """
    end = time.monotonic() + env_vars.sync_timeout()
    first = members.addresses.index(members.address)
    files: list[int] = []
    offer = ""
    if first == members.rank and members.addresses.count(members.address) > 1:
        files = [os.memfd_create("rlhf_stack_sync") for _ in range(SLOTS + 1)]
        offer = _offer(files)
    offers = members.exchange("memory", offer, end)
    if first != members.rank:
        files = _open_offered(offers[first])
    leader = str(first if files else members.rank)
    leaders = [int(rank) for rank in members.exchange("leader", leader, end)]
    if leaders.count(leaders[members.rank]) > 1:
        owner = leaders[members.rank] == members.rank
        return leaders, SharedBuffers(files[:SLOTS], owner), Kept(files[SLOTS], owner)
    for file in files:
        os.close(file)
    return leaders, None, Kept()


def _offer(files: Sequence[int]) -> str:
    """Return the paths of ``files`` and a token in them, which another process's file at that path lacks."""
    token = secrets.token_hex(TOKEN_BYTES)
    for file in files:
        os.pwrite(file, token.encode(), 0)
    return json.dumps({"paths": [f"/proc/{os.getpid()}/fd/{file}" for file in files], "token": token})


def _open_offered(offer: str) -> list[int]:
    """Open the files of an offer; return none if they are inaccessible from this process."""
    offered = json.loads(offer)
    files: list[int] = []
    try:
        for path in offered["paths"]:
            files.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            if os.pread(files[-1], 2 * TOKEN_BYTES, 0) != offered["token"].encode():
                raise OSError(f"{path} is another process's")
    except OSError:
        for file in files:
            os.close(file)
        return []
    return files
