"""Memory that the ranks of a node share: weights enter a node once, and are loaded from where they lie."""

import json
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_stack.config import env_vars
from rlhf_stack.sync.group import SLOTS, Buffers
from rlhf_stack.sync.membership import Members

if TYPE_CHECKING:
    import torch

TOKEN_BYTES = 16


class SharedBuffers(Buffers):
    """The buffers of a node, in ``files`` that all of its ranks have open: memory, on no file system."""

    def __init__(self, files: Sequence[int]) -> None:
        super().__init__("cpu", pinned=False)
        self._files = files

    def _new(self, size: int, index: int) -> "torch.Tensor":
        import torch

        os.posix_fallocate(self._files[index], 0, size)  # it never shrinks, whoever comes first
        return torch.frombuffer(mmap.mmap(self._files[index], size), dtype=torch.uint8)


def meet(members: Members) -> tuple[list[int], Buffers | None]:
    """Which rank leads each rank's node, by rank, and what this rank shares with others (None: nothing).

    The first rank of an address offers its memory to the others there. Who cannot open it (in another
    container of the same host, by another user) leads itself.
    """
    end = time.monotonic() + env_vars.sync_timeout()
    first = members.addresses.index(members.address)
    files: list[int] = []
    offer = ""
    if first == members.rank and members.addresses.count(members.address) > 1:
        files = [os.memfd_create("rlhf_stack_sync") for _ in range(SLOTS)]
        offer = _offer(files)
    offers = members.exchange("memory", offer, end)
    if first != members.rank:
        files = _opened(offers[first])
    heads = [int(head) for head in members.exchange("head", str(first if files else members.rank), end)]
    if heads.count(heads[members.rank]) > 1:
        return heads, SharedBuffers(files)
    for file in files:
        os.close(file)
    return heads, None


def _offer(files: Sequence[int]) -> str:
    """Where ``files`` are found, and what is in them, so that nobody takes another process's for these."""
    token = secrets.token_hex(TOKEN_BYTES)
    for file in files:
        os.pwrite(file, token.encode(), 0)
    return json.dumps({"paths": [f"/proc/{os.getpid()}/fd/{file}" for file in files], "token": token})


def _opened(offer: str) -> list[int]:
    """The files of an offer; none if they cannot be had from here."""
    offered = json.loads(offer)
    files: list[int] = []
    try:
        for path in offered["paths"]:
            files.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            if os.pread(files[-1], 2 * TOKEN_BYTES, 0).decode() != offered["token"]:
                raise OSError(f"{path} is another process's")
    except OSError:
        for file in files:
            os.close(file)
        return []
    return files
