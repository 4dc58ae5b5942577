"""Backend ``auto``: ranks exchange their devices, test NCCL with a broadcast, and select the same backend."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.sync.background import Background
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.gloo import GlooGroup
from rlhf_stack.sync.group import WeightGroup
from rlhf_stack.sync.membership import Members
from rlhf_stack.telemetry import run_log

PROBE_SECONDS = 60.0
PROBE_BYTES = 1024


@dataclass(frozen=True)
class RankDevice:
    """A rank's GPU, by an id that is the same in all processes, and why it has no NCCL ("" if it has)."""

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


def select_group(members: Members, join_nccl: Callable[[], WeightGroup]) -> WeightGroup:
    """Return a group of the backend that works, the same on every rank; each rank logs which one and why.

    ``join_nccl`` joins an NCCL group. If it fails or takes longer than a minute on any rank, all use gloo.
    """
    devices_json = members.exchange("facts", json.dumps(asdict(_own_device())), _deadline())
    reason = nccl_obstacle([RankDevice(**json.loads(text)) for text in devices_json], members.describe)
    group: WeightGroup | None = None
    if not reason:
        seconds = min(PROBE_SECONDS, env_vars.sync_timeout() / 2)
        probe = Background(lambda: _probe(join_nccl))
        late = f"no broadcast over NCCL finished within {seconds:g} s"
        group, problem = probe.result() if probe.done(seconds) else (None, late)
        problems = members.exchange("tried", problem, _deadline())
        reason = "; ".join(f"{members.describe(rank)}: {text}" for rank, text in enumerate(problems) if text)
    own = members.describe(members.rank)
    if group is None or reason:
        run_log.info(f"weight sync, {own}: auto selects gloo: {reason}")
        return GlooGroup(members)
    run_log.info(f"weight sync, {own}: auto selects nccl: a broadcast reached all ranks")
    return group


def _probe(join_nccl: Callable[[], WeightGroup]) -> tuple[WeightGroup | None, str]:
    """Return the NCCL group and why a test broadcast in it failed ("" if it succeeded)."""
    import torch

    try:
        group = join_nccl()
        sent = torch.arange(PROBE_BYTES, dtype=torch.uint8, device=group.device)
        received = sent.clone() if group.rank == 0 else torch.zeros_like(sent)
        group.start([received], "a test broadcast").finish()
    except (SyncError, RuntimeError, OSError) as error:
        return None, str(error).splitlines()[0]
    return group, "" if bool(torch.equal(received, sent)) else "a test broadcast delivered different bytes"


def _own_device() -> RankDevice:
    import torch

    if not devices.is_gpu() or not torch.cuda.is_available():
        return RankDevice(None, "")
    return RankDevice(devices.physical_gpu_id(), _nccl_problem())


def _nccl_problem() -> str:
    import torch

    try:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    except ModuleNotFoundError:  # vLLM 0.4: the group uses torch's NCCL
        return "" if torch.distributed.is_nccl_available() else "torch was built without it"
    try:
        NCCLLibrary()
    except (OSError, RuntimeError, AttributeError) as error:
        return str(error).splitlines()[0]
    return ""


def _deadline() -> float:
    return time.monotonic() + env_vars.sync_timeout()
