"""The supervision of a run by `rlhf-stack submit --restarts`: its state, its signals and its final table."""

import hashlib
import shlex
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import SequenceMatcher
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rlhf_stack import known_bad
from rlhf_stack.cluster.connect import connected
from rlhf_stack.config import env_vars
from rlhf_stack.diagnostics.doctor.checks import environment_of
from rlhf_stack.diagnostics.doctor.collect import collect_facts
from rlhf_stack.errors import UserError
from rlhf_stack.known_bad.finding import ERROR
from rlhf_stack.openrlhf.run_spec import Run
from rlhf_stack.recovery import job as jobs
from rlhf_stack.recovery import preemption
from rlhf_stack.recovery.attempts import Attempt
from rlhf_stack.recovery.checkpoints import Checkpoints, checkpoints_of
from rlhf_stack.recovery.job import Ended, HeadSilentError
from rlhf_stack.recovery.ray_cluster import RayCluster
from rlhf_stack.recovery.supervisor import (
    Limits,
    Supervisor,
    TakenOverError,
    first_state,
    is_taken_over,
    last_saved,
    read_state,
    select_checkpoint,
    words_to_continue,
)
from rlhf_stack.telemetry.run_log import messages

TERMINATED = 128 + signal.SIGTERM
COLUMNS = (
    *("attempt", "job", "waited before", "changed", "ended", "after", "from step", "saved step"),
    *("lost nodes", "error"),
)
STOP_SECONDS = 3.0  # of the grace time, for stopping the job


class TerminatedError(BaseException):
    """This process received SIGTERM; no error, so that nothing that expects errors keeps it."""


class Supervision:
    """A run that is submitted again after faults, on the cluster at ``address`` with its job ``server``."""

    def __init__(
        self,
        server: str,
        address: str,
        words: Sequence[str],
        limits: Limits,
        assess: Callable[[Sequence[str], Mapping[str, str], bool], list[str]],
        environment: Callable[[], dict[str, Any]],
    ) -> None:
        self._server, self._address, self._words, self._limits = server, address, words, limits
        run, checkpoints = checkpoints_of(words)
        _check_folder(run, checkpoints, limits, environment().get("working_dir"))
        key = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
        silent = max(jobs.LOST_SECONDS, limits.seconds) if limits.restarts else jobs.LOST_SECONDS
        self._cluster = RayCluster(server, address, key, assess, environment, confirmed_causes, silent)
        kept = self._cluster.recall()
        self._state = read_state(kept) if kept and "words" in kept else first_state(words, checkpoints)
        self._state.owner = uuid.uuid4().hex
        if self.follows_a_job:
            messages.info(f"this run is job {self._state.job}: following it")
        if limits.restarts and not checkpoints.every:
            messages.warning(
                "the run saves no checkpoints but the best of its evaluations, so each restart repeats what "
                "followed: "
                f"set {'--save_steps' if run.flat else '--ckpt.save_steps'}"
            )

        if limits.restarts and checkpoints.every and checkpoints.unsaved:
            messages.warning(
                f"the checkpoints of this run lack {', '.join(checkpoints.unsaved)}: each restart begins "
                "with the initial value, and its results differ from those of a run without a fault"
            )

    @property
    def follows_a_job(self) -> bool:
        """Whether a supervisor of the same run was killed, and left this job."""
        return bool(self._state.job)

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts so far."""
        return self._state.attempts

    def run(self, write: Callable[[str], None]) -> Ended:
        """Supervise the run, until another supervisor takes it over; its jobs' output goes to ``write``.

        Ctrl-C, and SIGTERM within `terminable`, stop its job, after a checkpoint if there is a grace time. If
        the job server does not confirm that, the state is kept, so that the same command follows the job.
        """
        supervisor = Supervisor(self._cluster, checkpoints_of, self._limits, self._state, write)
        may_run = True  # also after an error that nobody expects
        try:
            ended = supervisor.supervise()
            may_run = False
            return ended
        except UserError as error:
            may_run = isinstance(error, HeadSilentError)
            raise
        except (KeyboardInterrupt, TerminatedError):
            job = self._state.job
            may_run = bool(job)  # also if another signal ends the wait
            if job:
                try:
                    may_run = not self._stop(job)
                finally:
                    if may_run:
                        messages.warning(
                            f"job {job} may still run: ray job stop --address {self._server} {job} stops it, "
                            "and the same command follows it again"
                        )
                if self._limits.grace and not may_run:
                    self._select()
            raise
        finally:
            if not may_run:
                self._forget()
            _show(self.attempts)

    def _stop(self, job: str) -> bool:
        """Stop ``job``, within the grace time after a checkpoint; return whether it has ended.

        The job of a run that has another supervisor by now is not stopped.
        """
        end = time.monotonic() + self._limits.grace - STOP_SECONDS
        if self._answers(job) and is_taken_over(self._cluster, self._state):
            messages.info(str(TakenOverError()))
            return False
        if self._limits.grace:
            messages.info(f"a checkpoint is requested, within {self._limits.grace:.0f} s")
            try:
                self._save(job, max(0.0, end - time.monotonic()))
            except (UserError, OSError, RuntimeError) as error:
                messages.info(f"no checkpoint was saved: {error}")
        messages.info(f"stopping job {job}")
        return jobs.stop(self._server, job)

    def _answers(self, job: str) -> bool:
        """Whether the job server answers; without it, a connection to Ray could take minutes to fail."""
        try:
            jobs.ray_job(self._server, job, jobs.ANSWER_SECONDS)
        except (UserError, OSError, RuntimeError):
            return False
        return True

    def _save(self, job: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        known = jobs.ray_job(self._server, job, seconds)
        with connected(self._address):
            replies = preemption.request(end - time.monotonic(), known, False) if known else []
        for line in preemption.describe(replies):
            messages.info(line)
        if not replies:
            messages.info(
                "the run does not confirm the request: no step has ended, or its release saves no "
                "checkpoint on request"
            )

    def _select(self) -> None:
        """Let the run load the last complete checkpoint, also if it was stopped while it saved another."""
        _, checkpoints = checkpoints_of(self._state.words)
        saved = last_saved(checkpoints, self._state)
        for path in select_checkpoint(checkpoints, self._state, saved):
            messages.info(f"an incomplete checkpoint was set aside: {path}")
        if not saved:
            messages.info("the run has no complete checkpoint")
            return
        words = words_to_continue(checkpoints, self._state, saved)
        changes = described_changes(self._words, words)
        messages.info(f"the same command{changes} continues from the checkpoint of step {saved}")

    def _forget(self) -> None:
        """Keep of the state only the owner: it ends a supervisor before this one that is still alive."""
        if is_taken_over(self._cluster, self._state):
            return
        try:
            self._cluster.remember({"owner": self._state.owner})
        except (UserError, OSError, RuntimeError):  # the head has ended, and its GCS with it
            return


def _check_folder(run: Run, checkpoints: Checkpoints, limits: Limits, working_dir: str | None) -> None:
    """Warn of a folder that the ranks may write elsewhere than this command looks; `UserError` if they do."""
    if checkpoints.folder.is_absolute():
        return
    flag = f"{'--ckpt_path' if run.flat else '--ckpt.path'} {checkpoints.folder}"
    remedy = "set an absolute path, on storage that all nodes share"
    if working_dir and (checkpoints.every or limits.grace):
        raise UserError(
            f"{flag}: with --working-dir a relative path is in a temporary folder of each node, where no "
            f"restart finds the checkpoints: {remedy}"
        )
    messages.warning(
        f"{flag}: a relative path is below the working directory of each rank, and this command looks below "
        f"{Path.cwd()}. If that is another folder, a restart finds no checkpoint: {remedy}"
    )


def described_changes(before: Sequence[str], after: Sequence[str]) -> str:
    """Return which words a command line has in addition, or with other values, and which it lacks."""
    more: list[str] = []
    less: list[str] = []
    parts = {"with": more, "without": less}
    for kind, begin, end, start, stop in SequenceMatcher(None, before, after, False).get_opcodes():
        if kind in ("insert", "replace"):
            is_value = not after[start].startswith("-")
            more += after[start - is_value : stop]
        if kind in ("delete", "replace"):
            less += [word for word in before[begin:end] if word.startswith("-")]
    return "".join(f" {how} {shlex.join(words)}" for how, words in parts.items() if words)


def confirmed_causes(output: str) -> list[str]:
    """Return the known causes in ``output`` that the versions and settings of this image confirm."""
    node = collect_facts()
    rows = [row for row in known_bad.load() if row.has_condition and row.severity == ERROR]
    confirmed = {finding.id for finding in known_bad.judge(rows, environment_of(node))}
    found = known_bad.explain([row for row in rows if row.id in confirmed], output, node.versions)
    return [f"{finding.what}. {finding.remedy}" for finding in found]


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise `TerminatedError` inside the context, and `UserError` outside of it."""

    def terminate(_number: int, _frame: FrameType | None) -> NoReturn:
        raise TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except TerminatedError:
        raise UserError("terminated by SIGTERM", TERMINATED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(attempts: Sequence[Attempt]) -> None:
    rows = [
        (
            str(number),
            one.job,
            f"{one.waited:.0f} s" if one.waited >= 1 else "",
            "; ".join(one.changed),
            one.status.lower(),
            f"{one.seconds:.0f} s",
            str(one.resumed + 1),
            str(one.saved or "none"),
            ", ".join(one.lost),
            one.error[:200],
        )
        for number, one in enumerate(attempts, 1)
    ]
    if env_vars.log_format() == "json":
        for row in rows:
            pairs = zip(COLUMNS, row, strict=True)
            messages.info(", ".join(f"{name}: {value}" for name, value in pairs if value))
    elif rows:
        _print_table(rows)


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*map(escape, row))
    with suppress(OSError):
        Console(stderr=True, highlight=False).print(table)
