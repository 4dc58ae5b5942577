"""The rungs of the ladder, in the order in which they are climbed, and the interface of a rung."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, cast

from rlhf_stack.certify.model import Measurement


class NotClimbedError(Exception):
    """This rung has nothing to test here; the message is the reason."""


@dataclass(frozen=True)
class Place:
    """Where the ladder is climbed: on the Ray cluster at ``address``, or in this process if it is "".

    ``folder`` is the path of a folder of this run, the same on every node. ``small``: sizes for a CPU.
    """

    address: str
    folder: str
    small: bool


@dataclass(frozen=True)
class Found:
    """What a rung measured; ``problem`` is why it failed nevertheless, "" if it passed."""

    measurements: list[Measurement]
    details: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Step:
    """A rung: ``on`` is a "gpu" with torch alone, which is repeated on each GPU, or the whole "cluster".

    ``seconds`` is its deadline.
    """

    name: str
    title: str
    on: Literal["gpu", "cluster"]
    module: str
    seconds: float

    def load(self) -> Callable[[Place], Found]:
        """The function that climbs; it raises `NotClimbedError`, or another error if the rung failed."""
        module, _, name = self.module.partition(":")
        return cast(Callable[[Place], Found], getattr(import_module(module), name or "climb"))


HERE = "rlhf_stack.certify."
LADDER = (
    Step("facts", "every node reports its image, GPUs, driver and fabric", "cluster", HERE + "facts", 120),
    Step(
        "attention",
        "attention of packed samples, forward and backward, is that of each sequence in 32 bits",
        "gpu",
        HERE + "attention",
        300,
    ),
    Step(
        "collectives",
        "all-reduce between pairs of GPUs, every one of up to eight GPUs, and of all",
        "cluster",
        HERE + "collectives",
        400,
    ),
    Step(
        "network",
        "sync group between pairs of nodes, every one of up to 16 nodes, and of all GPUs",
        "cluster",
        HERE + "network",
        600,
    ),
    Step(
        "device-memory",
        "parameters in buckets arrive in device memory bit by bit, checksums see one changed bit",
        "gpu",
        HERE + "device_memory",
        300,
    ),
    Step(
        "streams",
        "NCCL on its own stream: buffers are ordered with the default stream, a late one ends in time",
        "gpu",
        HERE + "streams",
        180,
    ),
    Step(
        "sync",
        "weights arrive bit by bit on all ranks over each backend of the image and what `auto` selects",
        "cluster",
        HERE + "weight_sync",
        600,
    ),
    Step("ipc", "another process on the same GPU opens a tensor by its handle", "gpu", HERE + "ipc", 180),
    Step(
        "sleep", "an engine sleeps, wakes up and generates the same", "cluster", HERE + "engines:sleep", 900
    ),
    Step(
        "train-separate",
        "steps of OpenRLHF's trainer, engines on other GPUs, weights equal after each",
        "cluster",
        HERE + "training:separate",
        1200,
    ),
    Step(
        "train-colocated",
        "steps with trainer and engines on the same GPUs, weights equal after each",
        "cluster",
        HERE + "training:colocated",
        1200,
    ),
    Step(
        "memory",
        "the peaks that `plan` foretells are those that torch allocates",
        "gpu",
        HERE + "memory_peaks",
        900,
    ),
    Step(
        "throughput",
        "tokens per second of each engine; of several also while a rank on the GPU of the first one waits",
        "cluster",
        HERE + "engines:throughput",
        900,
    ),
    Step(
        "lost-rank",
        "a rank that is killed in a sync is named within the deadline",
        "cluster",
        HERE + "weight_sync:lost_rank",
        300,
    ),
)
NAMES = tuple(step.name for step in LADDER)
