"""The ranks of a sync group: how they find each other, and who is to blame when a transfer fails."""

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from rlhf_stack.config import env_vars
from rlhf_stack.sync.deadlines import Background
from rlhf_stack.sync.errors import SyncError

DONE, FAILED, HEARD = "done", "failed", " heard"
POLL_SECONDS = 0.5


class Members:
    """All ranks, over a store that rank 0 keeps at ``host``:``port``.

    `SyncError` names the ranks that are not there in time.
    """

    def __init__(self, host: str, port: int, rank: int, world: int) -> None:
        import torch.distributed as dist

        self.rank, self.world = rank, world
        self._host, self._port = host, port
        self._seconds = env_vars.sync_timeout()
        self._sync = 0
        self._blamed = False
        self._asked: Background[bool] | None = None
        limit = timedelta(seconds=self._seconds)
        end = time.monotonic() + self._seconds
        try:
            self.store = dist.TCPStore(host, port, None, rank == 0, limit, wait_for_workers=False)
        except dist.DistError as error:
            raise SyncError(
                f"weight sync, rank {rank} of {world} on {socket.gethostname()}: rank 0 (the trainer) is not "
                f"reachable at {host}:{port} within {self._seconds:g} s ({env_vars.SYNC_TIMEOUT}): {error}"
            ) from error
        self.address = host if rank == 0 else _own_address(host, port)
        self.addresses = self.exchange("address", self.address, end)

    def exchange(self, topic: str, value: str, end: float) -> list[str]:
        """What each rank gives for ``topic``, by rank; ``end``, of the monotonic clock, is the deadline."""
        keys = [f"{topic}/{rank}" for rank in range(self.world)]
        self.store.set(keys[self.rank], value)
        try:
            self.store.wait(keys, timedelta(seconds=max(0.001, end - time.monotonic())))
        except RuntimeError as error:
            raise SyncError(
                f"weight sync, rank {self.rank} on {self.address}: {self._absent(keys)} within "
                f"{self._seconds:g} s ({env_vars.SYNC_TIMEOUT}); rank 0 is the trainer, the others are "
                "engine workers: look for their errors in the log"
            ) from error
        return [self.store.get(key).decode() for key in keys]

    def connection(self) -> Any:
        """Another connection to the store, for a backend: it may wait in it, which blocks the connection."""
        import torch.distributed as dist

        limit = timedelta(seconds=self._seconds)
        return dist.TCPStore(self._host, self._port, None, False, limit, wait_for_workers=False)

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Around one sync: how it ended is told to the others, which may have to know whom to blame."""
        if self._sync:
            self.store.delete_key(self._key(self.rank))
        self._sync += 1
        self._blamed = False
        try:
            yield
        except BaseException as error:
            if not self._blamed:
                state = f"{type(error).__name__}: {error}"
                Background(lambda: self._fail(state)).done(env_vars.sync_grace())
            raise
        self.store.set(self._key(self.rank), DONE)

    def watch(self, done: Callable[[float], bool]) -> None:
        """Until ``done``, which waits for so many seconds; RuntimeError when another rank has failed."""
        while not done(POLL_SECONDS):
            if self._has_failed():
                raise RuntimeError("another rank failed first")

    def failure(self, what: str, error: Exception) -> SyncError:
        """The error for a step of a sync that failed here with ``error``, with whoever caused it.

        A rank that fails says so in the store; one that does not is dead, stopped or cut off.
        """
        self._blamed = True
        answer = self._silent([0])
        telling = Background(lambda: self._fail(what))
        if telling.done(env_vars.sync_grace()):
            asking = Background(self._blame)
            answer = asking.result() if asking.done(3 * env_vars.sync_grace()) else answer
        reason = str(error).strip().splitlines()[0]
        return SyncError(
            f"weight sync, {self.who(self.rank)}, {what}: {answer} "
            f"({env_vars.SYNC_TIMEOUT} is {self._seconds:g} s; {reason})"
        )

    def who(self, rank: int) -> str:
        """A rank by its number and node."""
        return f"rank {rank}{'' if rank else ' (the trainer)'} on {self.addresses[rank]}"

    def _has_failed(self) -> bool:
        """Whether a rank has said so; a trainer that is stopped never answers this."""
        self._asked = self._asked or Background(lambda: bool(self.store.check([self._key(FAILED)])))
        if not self._asked.done(POLL_SECONDS):
            return False
        asked, self._asked = self._asked, None
        return asked.result()

    def _fail(self, state: str) -> None:
        self.store.set(self._key(self.rank), state)
        self.store.set(self._key(FAILED), "")

    def _blame(self) -> str:
        try:
            states = self._collect("", range(self.world))
            if self.rank:
                self.store.set(self._key(self.rank) + HEARD, "")
            else:  # the store ends with this process, so the others first
                self._collect(HEARD, [rank for rank in states if rank])
        except RuntimeError:
            return self._silent([0])
        silent = [rank for rank in range(self.world) if rank not in states]
        told = [f"{self.who(rank)}: {state}" for rank, state in states.items() if state != DONE]
        return self._silent(silent) if silent else "; ".join(told)

    def _collect(self, suffix: str, ranks: Iterable[int]) -> dict[int, str]:
        """What ``ranks`` say in this sync, by rank, of those that do within `settings.sync_grace`.

        RuntimeError when the store is gone, which is rank 0's.
        """
        keys = {rank: self._key(rank) + suffix for rank in ranks}
        with suppress(RuntimeError):  # one says nothing in time, or the store is gone, as `check` tells
            self.store.wait(list(keys.values()), timedelta(seconds=env_vars.sync_grace()))
        return {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}

    def _silent(self, ranks: list[int]) -> str:
        who = ", ".join(self.who(rank) for rank in ranks)
        return f"{who} {'does' if len(ranks) == 1 else 'do'} not answer: dead, stopped or cut off"

    def _key(self, rank: object) -> str:
        return f"sync {self._sync}/{rank}"

    def _absent(self, keys: list[str]) -> str:
        """Who has not joined, as a sentence; the store is rank 0's and ends with it."""
        try:
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        except RuntimeError:
            return "not every rank joined, and rank 0 has given up"
        return f"ranks {missing} of {self.world} did not join"


def gloo_device(address: str) -> Any:
    """Where gloo listens: not by host name, which resolves to 127.0.1.1 on a stock Debian."""
    from torch.distributed import ProcessGroupGloo

    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_device(hostname=address)


def _own_address(host: str, port: int) -> str:
    """The address by which ``host`` knows this machine."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
