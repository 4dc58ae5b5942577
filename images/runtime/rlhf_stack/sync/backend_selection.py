"""Backend ``auto``: ranks exchange their devices, test NCCL with a broadcast, and select the same backend."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.lazy import torch
from rlhf_stack.sync.background import Background
from rlhf_stack.sync.gloo import GlooGroup
from rlhf_stack.sync.group import WeightGroup
from rlhf_stack.sync.membership import Members
from rlhf_stack.telemetry import run_log

PROBE_SECONDS = 60.0
PROBE_BYTES = 1024


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
            return f"{describe(rank)} has no NCCL: {device.nccl_problem}"
        first = next(index for index, other in enumerate(ranks) if other.gpu == device.gpu)
        if first != rank:
            return f"{describe(first)} and {describe(rank)} share GPU {device.gpu}, which NCCL refuses"
    return ""


def select_group(members: Members, join_nccl: Callable[[Members], WeightGroup]) -> WeightGroup:
    """Return a group of the backend that works, the same on every rank; each rank logs which one and why.

    ``join_nccl`` joins an NCCL group. If it fails or takes longer than a minute on any rank, all use gloo.
    """
    devices_json = members.exchange("facts", json.dumps(asdict(_own_device())), _deadline())
    reason = nccl_obstacle([RankDevice(**json.loads(text)) for text in devices_json], members.describe)
    own = members.describe(members.rank)
    if not reason:
        trial = NcclTrial(members.separate("nccl trial"), join_nccl)
        problem = trial.problem(min(PROBE_SECONDS, env_vars.sync_timeout() / 2))
        problems = members.exchange("tried", problem, _deadline())
        reason = "; ".join(f"{members.describe(rank)}: {text}" for rank, text in enumerate(problems) if text)
        if trial.group is not None and not reason:
            run_log.info(f"weight sync, {own}: auto selects nccl: a broadcast reached all ranks")
            return trial.group
        trial.abandon()
    run_log.info(f"weight sync, {own}: auto selects gloo: {reason}")
    return GlooGroup(members)


class NcclTrial:
    """A broadcast over NCCL in the background, among ``members`` that nothing else uses.

    It runs in this process: another one would need memory for a second CUDA context next to the engine's.
    """

    def __init__(self, members: Members, join: Callable[[Members], WeightGroup]) -> None:
        self.group: WeightGroup | None = None
        self._abandoned = False
        self._probe = Background(lambda: self._run(members, join))

    def problem(self, seconds: float) -> str:
        """Wait at most ``seconds``; return why the trial failed, "" if it succeeded."""
        if self._probe.done(seconds):
            return self._probe.result()
        return f"no broadcast over NCCL finished within {seconds:g} s"

    def abandon(self) -> None:
        """Abort the trial and close its group, now or as soon as joining it returns."""
        self._abandoned = True
        if self.group is not None:
            self.group.close()

    def _run(self, members: Members, join: Callable[[Members], WeightGroup]) -> str:
        try:
            self.group = group = join(members)
            if self._abandoned:
                group.close()
                return "abandoned"
            sent = torch.arange(PROBE_BYTES, dtype=torch.uint8, device=group.device)
            received = sent.clone() if group.rank == 0 else torch.zeros_like(sent)
            group.start([received], "a test broadcast").finish()
            return "" if torch.equal(received, sent) else "a test broadcast delivered different bytes"
        except Exception as error:  # of any kind: it must reach every rank, so that all use gloo
            return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _own_device() -> RankDevice:
    if not devices.is_gpu() or not torch.cuda.is_available():
        return RankDevice(None, "")
    return RankDevice(devices.physical_gpu_id(), _nccl_problem())


def _nccl_problem() -> str:
    try:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    except ModuleNotFoundError:  # vLLM 0.4: the group uses torch's NCCL
        return "" if torch.distributed.is_nccl_available() else "torch was built without it"
    try:
        NCCLLibrary()
    except Exception as error:  # of a library of any version: assertions and missing symbols too
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ""


def _deadline() -> float:
    return time.monotonic() + env_vars.sync_timeout()
