"""The ranks of a sync group: their rendezvous, and the diagnosis of which rank caused a failed transfer."""

import copy
import errno
import functools
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from rlhf_stack.config import env_vars
from rlhf_stack.inputs.text import first_names
from rlhf_stack.sync.background import Background
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.group import Watch, unwatched
from rlhf_stack.telemetry import run_log

DONE, FAILED, ACK = "done", "failed", " ack"
FINDER, FOUND, READERS = "finder", "found", "readers"  # of a diagnosis, which one rank makes for all
CAUSE = "cause: "  # before what a rank publishes of an error of its own; other errors are consequences
FIRST_PAUSE, POLL_SECONDS = 0.02, 0.5
MOST_NAMED = 16  # ranks in an error
RANK_0 = (range(1),)

Result = TypeVar("Result")
Ended = Callable[[float], bool]


class Members:
    """All ranks of a sync group, connected to a store that rank 0 serves at ``host``:``port``.

    ``listener`` is rank 0's socket there (`listen`), if it has one already. `SyncError` names the ranks that
    do not join in time. ``watch`` is called while the ranks form a group, until the first sync; what it
    raises ends that on all of them.
    """

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        world: int,
        listener: socket.socket | None = None,
        watch: Watch = unwatched,
    ) -> None:
        self.rank, self.world = rank, world
        self._host, self._port = host, port
        self._seconds = env_vars.sync_timeout()
        self._sync = 0
        self._diagnosed = False
        self._failure_query: Background[str] | None = None
        self._watch = watch
        self._served: Any = None
        end = time.monotonic() + self._seconds
        if rank == 0:
            listener = listener or listen(host, port)
        self.store = self._connect(end, listener)
        self.address = host if rank == 0 else _own_address(host, port)
        self.addresses = self.exchange("address", self.address, end)

    def exchange(self, topic: str, value: str, end: float) -> list[str]:
        """Return every rank's ``value`` for ``topic``, by rank; ``end`` is a time on the monotonic clock.

        Rank 0 collects the values and publishes them as one, so that the requests of a rank do not grow with
        the number of ranks.
        """
        keys = [f"{topic}/{rank}" for rank in range(self.world)]
        self._joining(lambda: self.store.set(keys[self.rank], value), keys, end)
        pause, answered = FIRST_PAUSE, end + POLL_SECONDS  # the last question is asked at the end
        while (values := self._joining(lambda: self._exchanged(topic, keys), keys, answered)) is None:
            self._call_watch()
            if time.monotonic() >= end:
                raise self._not_joined(keys)
            time.sleep(max(0.0, min(pause, end - time.monotonic())))
            pause = min(2 * pause, POLL_SECONDS)
        return values

    def _joining(self, action: Callable[[], Result], keys: list[str], end: float) -> Result:
        """Return what ``action`` returns, a step of an exchange with ``keys``."""
        try:
            return self.bounded(action, end)
        except SyncError:
            raise
        except RuntimeError as error:
            raise self._not_joined(keys) from error

    def _not_joined(self, keys: list[str]) -> SyncError:
        return SyncError(
            f"weight sync, rank {self.rank} on {self.address}: {self._missing(keys)} within "
            f"{self._seconds:g} s ({env_vars.SYNC_TIMEOUT}); rank 0 is the trainer, the others are "
            "engine workers: look for their errors in the log"
        )

    def bounded(self, action: Callable[[], Result], end: float) -> Result:
        """Return what ``action`` returns, which uses the store; RuntimeError at ``end``.

        The store waits for ever for a rank 0 whose host is frozen, whatever its own timeout is.
        """
        running = Background(action)
        if not running.done(max(0.0, end - time.monotonic())):
            raise RuntimeError("the store of rank 0 (the trainer) does not answer")
        return running.result()

    def connect_to_store(self) -> Any:
        """Return another connection to the store, for a backend: its waits block the connection they use."""
        return self._connect(time.monotonic() + self._seconds)

    def separate(self, name: str) -> "Members":
        """Return the same ranks with another connection and keys of their own, under ``name``.

        A failure among these ranks does not reach those that use ``self``, and the other way round.
        """
        import torch.distributed as dist

        separated = copy.copy(self)
        separated._served = self.store  # on rank 0 the server, which would end with the last reference to it
        separated.store = dist.PrefixStore(name, self.connect_to_store())
        separated._sync, separated._diagnosed, separated._failure_query = 0, False, None
        return separated

    @contextmanager
    def syncing(self, watch: Watch = unwatched) -> Iterator[None]:
        """Around one sync: publishes in the store how it ended, from which other ranks diagnose a failure.

        ``watch`` is called while a transfer lasts; what it raises ends the sync.
        """
        if self._sync:
            former = self._key(self.rank)
            self._update("beginning a sync", lambda: self.store.delete_key(former))
        self._sync += 1
        self._diagnosed, self._watch = False, watch
        try:
            yield
        except BaseException as error:
            if not self._diagnosed:
                self._publish_cause(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._watch = unwatched
        self._update("ending a sync", lambda: self.store.set(self._key(self.rank), DONE))

    def wait_for_transfer(self, ended: Ended, failure: Callable[[RuntimeError], SyncError]) -> None:
        """Wait until ``ended(seconds)``, which waits at most so long, is true.

        If it raises a RuntimeError, or another rank fails first, ``failure`` of that is raised; a `SyncError`
        is raised unchanged.
        """
        while True:
            try:
                if ended(POLL_SECONDS):
                    return
                if self._failed_state():
                    raise RuntimeError("another rank failed first")
            except SyncError:
                raise
            except RuntimeError as error:
                raise failure(error) from error
            self._call_watch()

    def raise_failure(self) -> None:
        """Raise `SyncError`, which names the cause, if a rank has published the cause of a failed sync.

        Not if it only waited in vain: the cause may be in the group that this rank waits for.
        """
        try:
            if not self._failed_state().startswith(CAUSE):
                return
            error = RuntimeError("another rank failed first")
        except RuntimeError as unreachable:
            error = unreachable
        raise self.failure("receiving from another trainer rank", error) from error

    def _call_watch(self) -> None:
        """Call the watch of this rank; what it raises is published, for the ranks that wait for this one."""
        try:
            self._watch()
        except Exception as error:
            self._diagnosed = True
            self._publish_cause(f"{type(error).__name__}: {error}")
            if not self._sync:
                Background(self._keep_store)
            raise

    def _keep_store(self) -> None:
        """Refer to the store, which rank 0 serves while anything does, until other ranks have read it."""
        time.sleep(env_vars.sync_grace())

    def failure(self, what: str, error: Exception) -> SyncError:
        """Return the error for a step ``what`` that failed on this rank with ``error``; it names the cause.

        A failed rank publishes this in the store; a rank that publishes nothing is dead, stopped or cut off.
        """
        self._diagnosed = True
        cause = self._unresponsive(RANK_0)
        publishing = Background(lambda: self._publish_failure(what))
        if publishing.done(env_vars.sync_grace()):
            diagnosis = Background(self._diagnose)
            if diagnosis.done(3 * env_vars.sync_grace()):
                cause = diagnosis.result()
                Background(self._acknowledge).done(env_vars.sync_grace())
        return SyncError(
            f"weight sync, {self.describe(self.rank)}, {what}: {cause} "
            f"({env_vars.SYNC_TIMEOUT} is {self._seconds:g} s; {first_line(error)})"
        )

    def own_error(self, what: str, error: Exception, remedy: str) -> SyncError:
        """Return the error for a step ``what`` whose failure on this rank no other rank has caused."""
        self._diagnosed = True
        self._publish_cause(f"{what}: {first_line(error)}")
        return SyncError(f"weight sync, {self.describe(self.rank)}, {what}: {first_line(error)}; {remedy}")

    def describe(self, rank: int) -> str:
        """Return a rank's number and node, for logs and errors."""
        return f"rank {rank}{'' if rank else ' (the trainer)'} on {self.addresses[rank]}"

    def _connect(self, end: float, listener: socket.socket | None = None) -> Any:
        """Connect to the store, which this rank serves with ``listener`` if it has one."""
        import torch.distributed as dist

        limit = timedelta(seconds=max(0.001, end - time.monotonic()))
        options = {
            "wait_for_workers": False,
            "master_listen_fd": None if listener is None else listener.detach(),
        }

        def connected() -> Any:
            store = dist.TCPStore(self._host, self._port, None, listener is not None, limit, **options)
            store.check(["connected"])  # the kernel accepts for a frozen process, and torch 2.3 asks nothing
            return store

        try:
            return self.bounded(connected, end)
        except RuntimeError as error:
            raise SyncError(
                f"weight sync, rank {self.rank} of {self.world} on {socket.gethostname()}: rank 0 (the "
                f"trainer) is not reachable at {self._host}:{self._port} within {self._seconds:g} s "
                f"({env_vars.SYNC_TIMEOUT}): {error}"
            ) from error

    def _exchanged(self, topic: str, keys: list[str]) -> list[str] | None:
        """Return the values of an exchange, None if they are not there yet.

        `SyncError` if a rank has published a failure. It only asks: torch logs each wait that ends in vain.
        """
        everything = f"{topic}/all"
        if not self.store.check([everything] if self.rank else keys):
            if cause := self._read_failure().removeprefix(CAUSE):
                raise SyncError(
                    f"weight sync, rank {self.rank} on {self.address}: another rank failed first: {cause}"
                )
            return None
        if self.rank == 0:
            values = [value.decode() for value in self.store.multi_get(keys)]
            self.store.set(everything, json.dumps(values))
            return values
        published: list[str] = json.loads(self.store.get(everything))
        return published

    def _update(self, what: str, action: Callable[[], Any]) -> None:
        """Let ``action`` update the store, within the deadline of a sync."""
        try:
            self.bounded(action, time.monotonic() + self._seconds)
        except RuntimeError as error:
            raise SyncError(
                f"weight sync, {self.describe(self.rank)}, {what}: {self._unresponsive(RANK_0)} "
                f"({env_vars.SYNC_TIMEOUT} is {self._seconds:g} s; {error})"
            ) from error

    def _failed_state(self) -> str:
        """Return what the first failed rank has published, "" while the store (rank 0) does not answer."""
        self._failure_query = self._failure_query or Background(self._read_failure)
        if not self._failure_query.done(POLL_SECONDS):
            return ""
        query, self._failure_query = self._failure_query, None
        return query.result()

    def _read_failure(self) -> str:
        failed = self._key(FAILED)
        return self.store.get(failed).decode() if self.store.check([failed]) else ""

    def _publish_cause(self, text: str) -> None:
        Background(lambda: self._publish_failure(CAUSE + text)).done(env_vars.sync_grace())

    def _publish_failure(self, state: str) -> None:
        self.store.set(self._key(self.rank), state)
        self.store.compare_set(self._key(FAILED), "", state)

    def _diagnose(self) -> str:
        """Return which rank failed by itself and why, and which are unresponsive: they may only be busy.

        If there is neither, it returns what failed on which rank. The first rank that asks finds it out for
        all: the requests of the others do not grow with the number of ranks. It need not be rank 0, which
        may still gather shards, or have ended. A rank that it found unresponsive, or that waits for it in
        vain, takes its place. It ends within 2.5 times `env_vars.sync_grace`.
        """
        grace = env_vars.sync_grace()
        try:
            finder = self._claim("")
            if finder == self.rank:
                with suppress(
                    RuntimeError
                ):  # a rank is late, or the store unreachable: `_split` distinguishes
                    self.store.wait(self._states(), timedelta(seconds=grace))
                return self._find_cause()
            for seconds in (
                1.75 * grace,
                0.75 * grace,
            ):  # the finder takes up to 1.5, its successor up to 0.5
                cause = self._cause_found_by(finder, seconds)
                if cause:
                    return cause
                former, finder = finder, self._claim(str(finder))
                if finder == self.rank:
                    return self._find_cause()
        except RuntimeError:
            return self._unresponsive(RANK_0)
        return f"the cause is unknown: {self.describe(former)} was to find it out, and has not"

    def _claim(self, former: str) -> int:
        """Return the rank that finds the cause: this one, if it was the rank ``former`` (none: "")."""
        return int(self.store.compare_set(self._key(FINDER), former, str(self.rank)))

    def _find_cause(self) -> str:
        """Return the cause, and publish it for the ranks that failed in consequence.

        RuntimeError if the store, which is rank 0's, is unreachable.
        """
        keys = self._states()
        present, absent = self._split(keys)
        published = self.store.multi_get([keys[rank] for rank in present]) if present else []
        states = {rank: state.decode() for rank, state in zip(present, published, strict=True)}
        cause = self._cause(states, absent)
        readers = [rank for rank, state in states.items() if not state.startswith((DONE, CAUSE)) and rank]
        self.store.set(self._key(READERS), json.dumps(readers))
        found = {"cause": cause, "unresponsive": [[part.start, part.stop] for part in absent]}
        self.store.set(self._found(self.rank), json.dumps(found))
        return cause

    def _cause(self, states: Mapping[int, str], absent: Sequence[range]) -> str:
        failed = {rank: state for rank, state in states.items() if state != DONE}
        causes = {rank: state for rank, state in failed.items() if state.startswith(CAUSE)}
        named = causes or ({} if absent else failed)
        texts = [
            f"{self.describe(rank)}: {named[rank].removeprefix(CAUSE)}" for rank in list(named)[:MOST_NAMED]
        ]
        if len(named) > MOST_NAMED:
            texts.append(f"and {len(named) - MOST_NAMED} more ranks")
        return "; ".join([*texts, self._unresponsive(absent)] if absent else texts)

    def _cause_found_by(self, finder: int, seconds: float) -> str:
        """Return the cause that rank ``finder`` publishes within ``seconds``.

        "" if it does not, or takes this rank for dead. RuntimeError if the store is unreachable.
        """
        key = self._found(finder)
        with suppress(RuntimeError):  # see `_diagnose`
            self.store.wait([key], timedelta(seconds=seconds))
        if not self.store.check([key]):
            return ""
        found = json.loads(self.store.get(key))
        return "" if any(self.rank in range(*part) for part in found["unresponsive"]) else found["cause"]

    def _acknowledge(self) -> None:
        """Report that this rank knows the cause; rank 0, with which the store ends, waits for the others."""
        if self.rank:
            self.store.set(self._key(self.rank) + ACK, "")
        else:
            self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        with suppress(RuntimeError):
            if not self.store.check([self._key(READERS)]):
                return
            readers = json.loads(self.store.get(self._key(READERS)))
            if readers:
                acks = [self._key(rank) + ACK for rank in readers]
                self.store.wait(acks, timedelta(seconds=env_vars.sync_grace()))

    def _split(self, keys: Sequence[str]) -> tuple[list[int], list[range]]:
        """Return the indices of ``keys`` that are set, and those of the others, as ranges.

        By halving: few requests if few are absent. It ends after half of `env_vars.sync_grace`; a range of
        several indices is then of keys of which some are absent.
        """
        end = time.monotonic() + env_vars.sync_grace() / 2
        every = range(len(keys))
        if self.store.check(list(keys)):
            return list(every), []
        pending = deque([every])  # each with an absent key
        present: list[int] = []
        absent: list[range] = []
        while pending and time.monotonic() < end:
            part = pending.popleft()
            if len(part) == 1:
                absent.append(part)
                continue
            half = len(part) // 2
            for piece in (part[:half], part[half:]):
                if self.store.check([keys[index] for index in piece]):
                    present += piece
                else:
                    pending.append(piece)
        return sorted(present), _merged([*absent, *pending])

    def _unresponsive(self, ranks: Sequence[range]) -> str:
        names = [
            self.describe(part[0]) if len(part) == 1 else f"some of the ranks {part[0]} to {part[-1]}"
            for part in ranks
        ]
        do = "do" if len(ranks) > 1 or len(ranks[0]) > 1 else "does"
        return f"{first_names(names, MOST_NAMED)} {do} not answer: dead, stopped or cut off"

    def _states(self) -> list[str]:
        return [self._key(rank) for rank in range(self.world)]

    def _found(self, finder: int) -> str:
        return self._key(f"{FOUND} by {finder}")

    def _key(self, rank: object) -> str:
        return _key_of(self._sync, rank)

    def _missing(self, keys: list[str]) -> str:
        """Return which ranks have not joined, as a clause; the store ends with rank 0, which serves it."""
        try:
            _, absent = self.bounded(lambda: self._split(keys), time.monotonic() + env_vars.sync_grace())
        except RuntimeError:
            return f"not every rank joined, and rank 0 at {self._host} has stopped waiting or does not answer"
        missing = [str(part[0]) if len(part) == 1 else f"some of {part[0]} to {part[-1]}" for part in absent]
        return f"ranks [{first_names(missing, MOST_NAMED)}] of {self.world} did not join"


def _merged(parts: Sequence[range]) -> list[range]:
    """Return ``parts`` in order; adjacent ones of several indices are merged."""
    merged: list[range] = []
    for part in sorted(parts, key=lambda part: part.start):
        if merged and len(part) > 1 and len(merged[-1]) > 1 and merged[-1].stop == part.start:
            merged[-1] = range(merged[-1].start, part.stop)
        else:
            merged.append(part)
    return merged


def ended(step: Background[Any], end: float = math.inf) -> Ended:
    """Return what `Members.wait_for_transfer` polls: whether ``step`` has ended; its error is raised.

    It raises a RuntimeError after ``end``, a time on the monotonic clock.
    """

    def poll(seconds: float) -> bool:
        if step.done(max(0.0, min(seconds, end - time.monotonic()))):
            step.result()
            return True
        if time.monotonic() >= end:
            raise RuntimeError("it has not ended within the deadline")
        return False

    return poll


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def gloo_device(address: str) -> Any:
    """Return gloo's device at ``address``: its default, the host name, is 127.0.1.1 on a stock Debian."""
    from torch.distributed import ProcessGroupGloo

    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_device(hostname=address)


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket for a store that listens at ``host`` alone: engines unpickle what the store holds.

    By default the kernel selects the port, which is then this socket's before another rank connects to it. An
    address that is not one of this machine, as behind NAT, is served on all interfaces.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    server = functools.partial(socket.create_server, family=family, backlog=socket.SOMAXCONN)
    try:
        try:
            return server((host, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            run_log.warning(
                f"weight sync: {host} is not an address of this node, so its store listens on all interfaces"
            )
            return server(("", port))
    except OSError as error:
        raise SyncError(
            f"weight sync: rank 0 (the trainer) cannot listen at {host}:{port}: {error}"
        ) from error


def end_formation(host: str, port: int, cause: str) -> None:
    """Let the ranks that form a group at ``host``:``port`` end with ``cause``, if they still wait there.

    For a process that is none of them. It ends within `env_vars.sync_grace`.
    """
    import torch.distributed as dist

    limit = timedelta(seconds=env_vars.sync_grace())

    def publish() -> None:
        store = dist.TCPStore(host, port, None, False, limit, wait_for_workers=False)
        store.set(_key_of(0, FAILED), cause)

    Background(publish).done(env_vars.sync_grace())


def _key_of(sync: int, rank: object) -> str:
    return f"sync {sync}/{rank}"


def _own_address(host: str, port: int) -> str:
    """Return the address of this machine from which ``host`` is reached."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
