"""``auto``: every rank says what it has, all choose alike, and NCCL is tried before it is believed."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.sync.deadlines import Background
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.gloo import GlooGroup
from rlhf_stack.sync.group import WeightGroup
from rlhf_stack.sync.membership import Members
from rlhf_stack.telemetry.logging import tell

PROBE_SECONDS = 60.0
TINY = 1024  # bytes of the broadcast that NCCL is tried with


@dataclass(frozen=True)
class Facts:
    """A rank's GPU, by a name that all processes on it give it, and why it has no NCCL ("" if it has)."""

    gpu: str | None
    problem: str


def against_nccl(facts: Sequence[Facts], who: Callable[[int], str]) -> str:
    """Why NCCL cannot work between ranks with these ``facts``; "" if nothing speaks against it."""
    for rank, fact in enumerate(facts):
        if fact.gpu is None:
            return f"{who(rank)} has no GPU"
        if fact.problem:
            return f"{who(rank)} has no NCCL: {fact.problem}"
        other = next(index for index, one in enumerate(facts) if one.gpu == fact.gpu)
        if other != rank:
            return f"{who(other)} and {who(rank)} share GPU {fact.gpu}, which NCCL refuses"
    return ""


def create(members: Members, nccl: Callable[[], WeightGroup]) -> WeightGroup:
    """A group of whichever backend works, the same on every rank; each says which and why.

    ``nccl`` joins an NCCL group. If that fails on one rank, or takes longer than a minute, all take gloo.
    """
    said = members.exchange("facts", json.dumps(asdict(_own_facts())), _end())
    reason = against_nccl([Facts(**json.loads(text)) for text in said], members.who)
    group: WeightGroup | None = None
    if not reason:
        seconds = min(PROBE_SECONDS, env_vars.sync_timeout() / 2)
        trying = Background(lambda: _tried(nccl))
        late = f"no broadcast over NCCL came through within {seconds:g} s"
        group, problem = trying.result() if trying.done(seconds) else (None, late)
        problems = members.exchange("tried", problem, _end())
        reason = "; ".join(f"{members.who(rank)}: {text}" for rank, text in enumerate(problems) if text)
    if group is None or reason:
        tell(f"weight sync, {members.who(members.rank)}: auto takes gloo: {reason}")
        return GlooGroup(members)
    tell(f"weight sync, {members.who(members.rank)}: auto takes nccl: a broadcast to all ranks came through")
    return group


def _tried(nccl: Callable[[], WeightGroup]) -> tuple[WeightGroup | None, str]:
    """The group, and what went wrong with a broadcast in it ("" if nothing)."""
    import torch

    try:
        group = nccl()
        sent = torch.arange(TINY, dtype=torch.uint8, device=group.device)
        got = sent.clone() if group.rank == 0 else torch.zeros_like(sent)
        group.start([got], "a first broadcast").finish()
    except (SyncError, RuntimeError, OSError) as error:
        return None, str(error).splitlines()[0]
    return group, "" if bool(torch.equal(got, sent)) else "a first broadcast brought other bytes"


def _own_facts() -> Facts:
    import torch

    if not devices.is_gpu() or not torch.cuda.is_available():
        return Facts(None, "")
    return Facts(devices.physical_gpu_id(), _nccl_problem())


def _nccl_problem() -> str:
    import torch

    try:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    except ModuleNotFoundError:  # vLLM 0.4, where torch's is taken
        return "" if torch.distributed.is_nccl_available() else "torch was built without it"
    try:
        NCCLLibrary()
    except (OSError, RuntimeError, AttributeError) as error:
        return str(error).splitlines()[0]
    return ""


def _end() -> float:
    return time.monotonic() + env_vars.sync_timeout()
