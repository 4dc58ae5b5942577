"""Backend ``auto``: ranks exchange their devices, test NCCL with a broadcast, and select the same backend."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions

from rlhf_stack import known_bad
from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.lazy import torch
from rlhf_stack.sync.background import Background
from rlhf_stack.sync.gloo import GlooGroup
from rlhf_stack.sync.group import WeightGroup
from rlhf_stack.sync.membership import Members, first_line
from rlhf_stack.sync.nccl import StreamGroup
from rlhf_stack.telemetry import run_log

PROBE_SECONDS = 60.0
PROBE_BYTES = 1024
BAD_FOR_NCCL = ("vllm-second-nccl-group",)  # rows of `rlhf_stack.known_bad`


@dataclass(frozen=True)
class RankDevice:
    """A rank's GPU, by an id equal in all processes, and why NCCL is unavailable ("" if available)."""

    gpu: str | None
    nccl_problem: str


def nccl_obstacle(ranks: Sequence[RankDevice], describe: Callable[[int], str]) -> str:
    """Return why NCCL cannot work between ``ranks``, "" if nothing prevents it; ``describe`` names a rank."""
    for rank, device in enumerate(ranks):
        if device.gpu is None:
            return f"{describe(rank)} has no GPU"
        if device.nccl_problem:
            return f"{describe(rank)} cannot use NCCL: {device.nccl_problem}"
        first = next(index for index, other in enumerate(ranks) if other.gpu == device.gpu)
        if first != rank:
            return f"{describe(first)} and {describe(rank)} share GPU {device.gpu}, which NCCL refuses"
    return ""


def select_group(members: Members, new_nccl: Callable[[Members], StreamGroup]) -> WeightGroup:
    """Return a group of the backend that works, the same on every rank; each rank logs which one and why.

    ``new_nccl`` returns an NCCL group that is to join. If that fails or takes longer than a minute on any
    rank, all use gloo.
    """
    devices_json = members.exchange("facts", json.dumps(asdict(_own_device())), _deadline())
    reason = nccl_obstacle([RankDevice(**json.loads(text)) for text in devices_json], members.describe)
    own = members.describe(members.rank)
    if not reason:
        group, reason = _try_nccl(members, new_nccl)
        if group is not None:
            group.selection = "a broadcast reached all ranks"
            run_log.info(f"weight sync, {own}: auto selects nccl: {group.selection}")
            return group
    run_log.info(f"weight sync, {own}: auto selects gloo: {reason}")
    gloo = GlooGroup(members)
    gloo.selection = reason
    return gloo


def _try_nccl(members: Members, new_nccl: Callable[[Members], StreamGroup]) -> tuple[StreamGroup | None, str]:
    """Return a group over NCCL that works on every rank, else None and why it does not on some of them."""
    trial = NcclTrial(members.separate("nccl trial"), new_nccl)
    group = None
    try:
        problem = trial.problem(min(PROBE_SECONDS, env_vars.sync_timeout() / 2))
        problems = members.exchange("tried", problem, _deadline())
        reason = "; ".join(f"{members.describe(rank)}: {text}" for rank, text in enumerate(problems) if text)
        group = None if reason else trial.group
    finally:
        if group is None:  # also if another rank is lost: a communicator that joins would wait for it
            trial.abandon()
    return group, reason


class NcclTrial:
    """A broadcast over NCCL in the background, among ``members`` that nothing else uses.

    It runs in this process: another one would need memory for a second CUDA context next to the engine's.
    """

    def __init__(self, members: Members, new: Callable[[Members], StreamGroup]) -> None:
        self.group: StreamGroup | None = None
        self._abandoned = False
        self._probe = Background(lambda: self._run(members, new))

    def problem(self, seconds: float) -> str:
        """Wait at most ``seconds``; return why the trial failed, "" if it succeeded."""
        if self._probe.done(seconds):
            return self._probe.result()
        return f"no broadcast over NCCL finished within {seconds:g} s"

    def abandon(self) -> None:
        """Abort the trial, also while its group joins, and close the group."""
        self._abandoned = True
        if self.group is not None:
            self.group.close()

    def _run(self, members: Members, new: Callable[[Members], StreamGroup]) -> str:
        try:
            self.group = group = new(members)
            if not self._abandoned:
                group.join()
            if self._abandoned:
                group.close()
                return "abandoned"
            sent = torch.arange(PROBE_BYTES, dtype=torch.uint8, device=group.device)
            received = sent.clone() if group.rank == 0 else torch.zeros_like(sent)
            group.start([received], "a test broadcast").finish()
            return "" if torch.equal(received, sent) else "a test broadcast delivered different bytes"
        except Exception as error:  # of any kind: it must reach every rank, so that all use gloo
            return first_line(error)


def _own_device() -> RankDevice:
    if not devices.is_gpu() or not torch.cuda.is_available():
        return RankDevice(None, "")
    return RankDevice(devices.physical_gpu_id(), _nccl_problem())


def known_defect() -> str:
    """Return why a sync over NCCL is known to fail with the installed versions and the remedy, else ""."""
    versions = {found.name: found.version for found in distributions()}
    rows = [row for row in known_bad.load() if row.id in BAD_FOR_NCCL]
    for finding in known_bad.judge(rows, known_bad.Environment(versions)):
        return (
            f"weight sync over nccl is known not to work here: {finding.what} ({finding.evidence}; "
            f"{', '.join(finding.sources)}); use {finding.remedy}"
        )
    return ""


def _nccl_problem() -> str:
    if defect := known_defect():
        return defect
    try:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    except ModuleNotFoundError:  # vLLM 0.4: the group uses torch's NCCL
        return "" if torch.distributed.is_nccl_available() else "torch was built without it"
    try:
        NCCLLibrary()
    except Exception as error:  # of a library of any version: assertions and missing symbols too
        return first_line(error)
    return ""


def _deadline() -> float:
    return time.monotonic() + env_vars.sync_timeout()
