"""Supervises a run from outside: submits it, and after a fault again from its last complete checkpoint.

The cluster is behind `Cluster`, so that the loop is tested without one.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlhf_stack import known_bad
from rlhf_stack.errors import UserError
from rlhf_stack.inputs.text import one_line, shortened
from rlhf_stack.openrlhf.run_spec import Run
from rlhf_stack.recovery.attempts import (
    FAILED,
    HEAD_LOST,
    SUCCEEDED,
    Attempt,
    excluded_nodes,
    is_unplaced,
    kind_of,
    why_not_again,
)
from rlhf_stack.recovery.checkpoints import UNIVERSAL_FLAG, Checkpoints
from rlhf_stack.recovery.job import Ended, HeadLostError, HeadSilentError, new_id
from rlhf_stack.recovery.nodes import Nodes, lost_nodes
from rlhf_stack.recovery.smaller import (
    changed_layout,
    why_no_fewer_engines,
    why_no_fewer_ranks,
    with_fewer_engines,
    with_fewer_ranks,
)
from rlhf_stack.telemetry.run_log import messages

POLL_SECONDS = 2.0
KEPT_CHUNKS = 5000  # of a job's output, to find its error


class GivenUpError(UserError):
    """The run is not submitted again; the message has the reason."""


class TakenOverError(UserError):
    """Another supervisor has begun to follow this run."""

    def __init__(self) -> None:
        super().__init__("another `submit` supervises this run now: its jobs and checkpoints are left to it")


class Cluster(Protocol):
    """What the supervisor needs of a Ray cluster and of its job server."""

    def problems(self, words: Sequence[str], excluded: Sequence[str], scales: bool = False) -> list[str]:
        """Return why the run cannot start on the free resources now.

        With ``scales``, too few resources are no problem if the run may ask an autoscaler for them.
        """

    def submit(self, job: str, words: Sequence[str], excluded: Sequence[str]) -> None:
        """Submit the run as ``job``, unless it was; `HeadSilentError` if that is unknown."""

    def follow(self, job: str, write: Callable[[str], None]) -> Ended:
        """Follow a job until it ends; `HeadLostError` if the head ends first, or does not answer."""

    def clean(self) -> Nodes:
        """Remove what the run left on each node; `UserError` if the head does not answer."""

    def known_causes(self, output: str) -> list[str]:
        """Return the causes in an output that the versions and settings of the image confirm."""

    def remember(self, state: dict[str, Any]) -> None:
        """Keep ``state`` for a supervisor that is started again."""

    def recall(self) -> dict[str, Any] | None:
        """Return the state that was kept last, None if there is none."""


@dataclass(frozen=True)
class Limits:
    """At most ``restarts``; each waits up to ``seconds`` for nodes, then uses ``min_nodes`` or more.

    A run that is to be stopped has ``grace`` seconds to save a checkpoint; 0: it is stopped at once.
    """

    restarts: int
    min_nodes: int | None = None
    seconds: float = 600.0
    grace: float = 0.0


@dataclass
class State:
    """The progress of a supervised run: the command line of ``job``, the attempts before it, and its nodes.

    The first attempt continued from step ``loaded``, 0 if from none; checkpoints of later steps are the run's
    own if they were written after the unix time ``began``. ``converted`` is the step whose checkpoint was
    converted for the present number of ranks, 0 if none was. ``nodes`` has Ray's id of the node at each
    address when ``job`` was placed, ``gone`` the ids of nodes that were dead or silent then, and ``silent``
    the addresses of those that ``job`` does not use because they did not answer, or had a GPU that could not
    be used, although Ray listed them as alive. ``waited`` and ``changed`` are those of the `Attempt` of
    ``job``. ``owner`` identifies the supervisor.
    """

    words: list[str]
    began: float
    job: str = ""
    resumed: int = 0
    converted: int = 0
    nodes: dict[str, str] = field(default_factory=dict)
    attempts: list[Attempt] = field(default_factory=list)
    readmitted: list[str] = field(default_factory=list)
    waited: float = 0.0
    changed: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    owner: str = ""
    loaded: int = 0
    silent: list[str] = field(default_factory=list)

    @property
    def excluded(self) -> list[str]:
        """The nodes that the job must not use.

        These are those that were lost too often, except ``readmitted`` ones, without which there was no room,
        and ``silent`` ones.
        """
        lost = [node for node in excluded_nodes(self.attempts) if node not in self.readmitted]
        return sorted({*lost, *self.silent})

    def to_json(self) -> dict[str, Any]:
        """Return JSON values from which `read_state` makes an equal state."""
        return asdict(self)


def read_state(values: dict[str, Any]) -> State:
    """Return the state that `State.to_json` wrote."""
    attempts = [_read_attempt(one) for one in values["attempts"]]
    return State(**(values | {"attempts": attempts}))


def _read_attempt(values: dict[str, Any]) -> Attempt:
    """An attempt from its JSON values, in which tuples are lists."""
    found: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    return Attempt(**found)


class Supervisor:
    """Submits a run until it succeeds or must not be repeated; ``write`` prints the output of its jobs.

    ``describe`` returns the run of a command line and its checkpoints.
    """

    def __init__(
        self,
        cluster: Cluster,
        describe: Callable[[Sequence[str]], tuple[Run, Checkpoints]],
        limits: Limits,
        state: State,
        write: Callable[[str], None],
    ) -> None:
        self._cluster, self._describe, self._limits, self._write = cluster, describe, limits, write
        self.state = state
        self._ended = time.monotonic()  # of the last job
        self._settled: tuple[int, frozenset[str]] = (0, frozenset())  # attempts and nodes; see `_settle`
        self._run, self._checkpoints = describe(state.words)

    def supervise(self) -> Ended:
        """Return the final state of the last job.

        Raises `GivenUpError` if another attempt cannot be placed, `HeadSilentError` if the job may still run,
        `TakenOverError` before it changes anything of a run that has another supervisor by now.
        """
        state = self.state
        self._adopt()
        self._cluster.remember(state.to_json())  # takes over from the one before, which may be alive
        if not state.nodes:
            self._keep(self._cluster.clean())
        while True:
            if not state.job:
                self._submit()
            ended, attempt, lost_head = self._follow()
            state.attempts.append(attempt)
            if ended.status == SUCCEEDED:
                return ended
            if isinstance(lost_head, HeadSilentError):
                raise _kept(lost_head)
            if reason := why_not_again(state.attempts, self._limits.restarts):
                if self._limits.restarts:
                    messages.warning(f"not submitted again: {reason}")
                if lost_head:
                    raise lost_head
                return ended
            self._prepare()

    def _adopt(self) -> None:
        """Continue from what another supervisor has submitted since the state of this one was read."""
        kept: dict[str, Any] | None = None
        with suppress(Exception):  # as in `is_taken_over`
            kept = self._cluster.recall()
        if not kept or "words" not in kept:
            return
        found, state = read_state(kept), self.state
        if (found.job, len(found.attempts)) != (state.job, len(state.attempts)):
            vars(state).update(vars(found) | {"owner": state.owner})
            self._run, self._checkpoints = self._describe(state.words)
            messages.info(f"this run was submitted meanwhile: {state.job or 'no job runs now'}")

    def _submit(self) -> None:
        """Submit the run; again while the job server of a restarted head does not take jobs yet.

        The state has the job before the job server does, whatever interrupts the submission.
        """
        state, end = self.state, time.monotonic() + self._limits.seconds
        state.job = new_id()
        while True:
            self._check_owner()
            try:
                state.waited = time.monotonic() - self._ended
                self._cluster.remember(state.to_json())
                return self._cluster.submit(state.job, state.words, state.excluded)
            except HeadSilentError as problem:
                raise _kept(problem) from None
            except UserError as problem:
                if not state.attempts or time.monotonic() > end:
                    raise
                messages.warning(f"the run cannot be submitted yet: {problem}")
            time.sleep(POLL_SECONDS)

    def _check_owner(self) -> None:
        if is_taken_over(self._cluster, self.state):
            raise TakenOverError

    def _follow(self) -> tuple[Ended, Attempt, HeadLostError | None]:
        state, begun = self.state, time.monotonic()
        kept: deque[str] = deque(maxlen=KEPT_CHUNKS)

        def write(text: str) -> None:
            kept.append(text)
            self._write(text)

        lost: tuple[str, ...] = ()
        lost_head: HeadLostError | None = None
        try:
            ended = self._cluster.follow(state.job, write)
        except HeadLostError as problem:
            ended, lost_head = Ended(state.job, HEAD_LOST, 1), problem
        self._ended = time.monotonic()
        seconds = self._ended - begun
        output, status = "".join(kept), ended.status
        if status not in (SUCCEEDED, HEAD_LOST):
            try:
                lost = self._lost(self._cluster.clean())
            except UserError as problem:  # `_placeable` waits for the head; no node is blamed meanwhile
                messages.warning(f"the head was lost after job {ended.job} had ended: {problem}")
                status = HEAD_LOST if status == FAILED else status
        causes = [] if ended.status == SUCCEEDED else self._cluster.known_causes(output)
        saved = last_saved(self._checkpoints, state)
        found = None if ended.status == SUCCEEDED else known_bad.last_error(output)
        error = str(lost_head or "") or (found.text if found else "")
        attempt = Attempt(
            ended.job,
            status,
            ended.code,
            seconds,
            state.resumed,
            saved,
            error,
            lost,
            tuple(causes),
            state.waited,
            tuple(state.changed),
        )
        return ended, attempt, lost_head

    def _keep(self, nodes: Nodes, excluded: Sequence[str] = ()) -> None:
        """Keep the nodes on which the job is placed, and those that cannot be lost during it."""
        usable = {address: node for address, node in nodes.answering.items() if address not in excluded}
        self.state.nodes, self.state.gone = usable, sorted(nodes.gone)

    def _lost(self, now: Nodes) -> tuple[str, ...]:
        """Return, and report with the reasons, the nodes that the job may have used and that were lost."""
        excluded, found = self.state.excluded, lost_nodes(self.state.nodes, self.state.gone, now)
        lost = {address: reason for address, reason in found.items() if address not in excluded}
        if lost:
            reasons = (
                f"{address} ({shortened(one_line(why)) or 'unknown'})" for address, why in lost.items()
            )
            messages.warning(f"lost nodes (reason): {', '.join(reasons)}")
        return tuple(lost)

    def _prepare(self) -> None:
        """Select the checkpoint, and wait until the cluster has room for the next attempt."""
        state, saved = self.state, self.state.attempts[-1].saved
        self._select(saved)
        state.words = words_to_continue(self._checkpoints, state, saved)
        state.job, state.resumed = "", saved
        messages.info(
            f"submitting the run again, {len(state.attempts)} of {self._limits.restarts} restarts, "
            + (f"from the checkpoint of step {saved}" if saved else "from its beginning: no checkpoint")
        )
        before, converted = state.words, state.converted
        excluded = set(excluded_nodes(state.attempts[:-1])) - set(state.readmitted) | set(state.silent)
        state.words = self._placeable()
        state.changed = changed_layout(before, state.words)
        if state.converted != converted:
            state.changed.append(f"checkpoint of step {state.converted} converted")
        state.changed += self._changed_nodes(excluded)
        self._run, self._checkpoints = self._describe(state.words)

    def _select(self, saved: int) -> None:
        self._check_owner()
        for path in select_checkpoint(self._checkpoints, self.state, saved):
            messages.warning(f"an incomplete checkpoint was set aside: {path}")

    def _placeable(self) -> list[str]:
        """Wait for nodes; return the command line that can be placed, a smaller one if it must.

        A run that may ask an autoscaler for nodes does so itself, once, before anything waits for them here.
        """
        state, limits = self.state, self._limits
        scales = not is_unplaced(state.attempts[-1])
        state.silent = []
        excluded = state.excluded
        if excluded:
            messages.warning(f"nodes that were lost twice are not used: {', '.join(excluded)}")
        end = time.monotonic() + limits.seconds
        while True:
            nodes, problems = self._look(state.words, excluded, scales)
            usable = [address for address in nodes.answering if address not in excluded]
            if not problems:
                self._keep(nodes, excluded)
                return state.words
            if time.monotonic() > end:
                break
            time.sleep(POLL_SECONDS)
        lost = [address for address in excluded if address not in nodes.silent]
        if unknown := [address for address in nodes.silent if address not in excluded]:
            for how, those in _kinds(nodes, unknown):
                messages.warning(f"nodes that {how} are not used: {those}")
            state.silent = unknown
            excluded = state.excluded
            if not (problems := self._problems(state.words, excluded, scales)):
                self._keep(nodes, excluded)
                return state.words
        words, why_not = self._smaller(len(usable), excluded)
        if words:
            self._keep(nodes, excluded)
            return words
        if lost and not self._look(state.words, nodes.silent)[1]:
            messages.warning(f"nodes that were lost twice are used again: {', '.join(lost)}")
            state.readmitted += lost
            self._keep(nodes, state.excluded)
            return state.words
        raise GivenUpError(
            f"the run cannot be placed after {limits.seconds:.0f} s on {len(usable)} nodes "
            f"({', '.join(usable) or 'none'}): {problems[0]}\n  no smaller layout is used: {why_not}"
        )

    def _smaller(self, usable: int, excluded: Sequence[str]) -> tuple[list[str], str]:
        """Return the largest smaller command line that can be placed, or none and the reason."""
        state, least = self.state, self._limits.min_nodes
        if least is None:
            return [], "--min-nodes is not given"
        if usable < least:
            return [], f"--min-nodes is {least}"
        refused: list[str] = []
        for words in with_fewer_engines(state.words, self._run):
            if not (problems := self._problems(words, excluded)):
                messages.warning(f"continuing on {usable} nodes with fewer engines")
                return words, ""
            refused.append(self._refusal(words, problems))
        if words := self._with_fewer_ranks(excluded, refused):
            messages.warning(f"continuing on {usable} nodes with fewer ranks of the trainer")
            return words, ""
        impossible = [why_no_fewer_engines(self._run), why_no_fewer_ranks(self._run)]
        kinds = {kind_of(reason): reason for reason in reversed(refused)}
        return [], "; ".join([*filter(None, impossible), *reversed(kinds.values())])

    def _problems(self, words: Sequence[str], excluded: Sequence[str], scales: bool = False) -> list[str]:
        """Why a command line cannot be placed; numbers of a smaller one may also contradict each other."""
        try:
            return self._cluster.problems(words, excluded, scales)
        except UserError as error:
            return [str(error)]

    def _refusal(self, words: Sequence[str], problems: Sequence[str]) -> str:
        return f"{', '.join(changed_layout(self.state.words, words))}: {problems[0].splitlines()[0]}"

    def _with_fewer_ranks(self, excluded: Sequence[str], refused: list[str]) -> list[str]:
        """Return the command line with the most ranks that can be placed, its checkpoint converted for them.

        Empty if there is none; the reason of each that cannot be placed is added to ``refused``.
        """
        state, saved = self.state, self.state.attempts[-1].saved
        load = self._checkpoints.load_flag
        is_any = False
        for words in with_fewer_ranks(state.words, self._run):
            is_any = True
            # A checkpoint is loaded once it is converted, so that it is no obstacle before.
            bare = [word for word in words if word not in (load, UNIVERSAL_FLAG)]
            if problems := self._problems(bare, excluded):
                refused.append(self._refusal(words, problems))
                continue
            if not saved:
                return words if self._checkpoints.universal else bare
            if saved > state.converted:
                self._check_owner()
                self._checkpoints.convert(saved, state.began, state.loaded)
                state.converted = saved
            return [*bare, load, UNIVERSAL_FLAG]
        if not is_any and not why_no_fewer_ranks(self._run):
            refused.append("the engines on the trainer's GPUs cannot be reduced in proportion to its nodes")
        return []

    def _changed_nodes(self, before: set[str]) -> list[str]:
        """Return which nodes are excluded now and were not ``before``, and the other way round."""
        now = set(self.state.excluded)
        nodes = {"without": now - before, "again with": before - now}
        return [f"{how} {', '.join(sorted(those))}" for how, those in nodes.items() if those]

    def _look(
        self, words: Sequence[str], excluded: Sequence[str], scales: bool = False
    ) -> tuple[Nodes, list[str]]:
        """The nodes, and why the run cannot be placed on those that answer now."""
        try:
            nodes = self._cluster.clean()
            self._settle(nodes)
            if unknown := [address for address in nodes.silent if address not in excluded]:
                return nodes, [f"Ray lists nodes that do not answer: {', '.join(unknown)}"]
            return nodes, self._cluster.problems(words, excluded, scales)
        except TakenOverError:
            raise
        except UserError as error:  # the head has not been restarted yet
            return Nodes({}, ()), [str(error)]

    def _settle(self, nodes: Nodes) -> None:
        """Select the checkpoint again: the ranks of a lost head's job may write until they are removed."""
        last, settled = self.state.attempts[-1], (len(self.state.attempts), frozenset(nodes.answering))
        if last.status == HEAD_LOST and settled != self._settled:
            self._select(last.saved)
            self._settled = settled


def _kinds(nodes: Nodes, silent: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield why ``silent`` nodes cannot be used, and their addresses, with the faults of their GPUs."""
    if unknown := [address for address in silent if address not in nodes.faults]:
        yield "do not answer", ", ".join(unknown)
    faulty = [
        f"{address} ({shortened(one_line(nodes.faults[address]))})"
        for address in silent
        if address in nodes.faults
    ]
    if faulty:
        yield "have a GPU that cannot be used", ", ".join(faulty)


def is_taken_over(cluster: Cluster, state: State) -> bool:
    """Whether another supervisor keeps the state of the run; False if the head does not answer."""
    with suppress(Exception):  # of any type: Ray's differ from release to release
        kept = cluster.recall()
        return kept is not None and kept.get("owner") != state.owner
    return False


def _kept(problem: HeadSilentError) -> HeadSilentError:
    return HeadSilentError(f"{problem}. The same command follows it again", problem.code)


def first_state(words: Sequence[str], checkpoints: Checkpoints) -> State:
    """Return the state of a run that begins now, from the checkpoint that its command loads."""
    if not checkpoints.loads:
        return State(list(words), time.time())
    with _readable(checkpoints):
        loaded = checkpoints.loaded_step()
        return State(list(words), checkpoints.own_since(loaded), loaded=loaded)


def last_saved(checkpoints: Checkpoints, state: State) -> int:
    """Return the last step from which a run can continue, 0 if there is none."""
    with _readable(checkpoints):
        return max(checkpoints.complete_steps(state.began, state.loaded) | {state.converted})


def select_checkpoint(checkpoints: Checkpoints, state: State, saved: int) -> list[Path]:
    """Let the next run load the checkpoint of step ``saved``; return what was set aside.

    Without a checkpoint (0), these are the folders that the command would load an incomplete one from.
    """
    if not saved and (checkpoints.universal or not checkpoints.loads):
        return []
    with _readable(checkpoints):
        return checkpoints.select(saved, state.began, state.loaded)


@contextmanager
def _readable(checkpoints: Checkpoints) -> Iterator[None]:
    """Raise `GivenUpError` for an error of the file system that has the checkpoints."""
    try:
        yield
    except OSError as error:
        where = error.filename or checkpoints.folder
        raise GivenUpError(f"the checkpoint to continue from: {where}: {error.strerror or error}") from None


def words_to_continue(checkpoints: Checkpoints, state: State, saved: int) -> list[str]:
    """Return the command line of ``state`` with the flags that load the checkpoint of step ``saved``."""
    words = list(state.words)
    if saved and checkpoints.load_flag not in words:
        words.append(checkpoints.load_flag)
    if saved > state.converted:  # the run's own checkpoints are not universal ones
        words = [word for word in words if word != UNIVERSAL_FLAG]
    return words
