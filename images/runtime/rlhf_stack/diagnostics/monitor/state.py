"""Derives the state of a run from its events, metrics and Ray's table of placement groups: pure functions."""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_stack.diagnostics.monitor.metrics import Sample

RESTARTS = "ray_rlhf_stack_engine_restarts"
VERSION = "ray_rlhf_stack_weight_version"
RECOVERY = "ray_rlhf_stack_recovery_seconds"
TOKENS = "ray_rlhf_stack_engine_tokens_per_second"
SYNC_RATE = "ray_rlhf_stack_sync_gigabytes_per_second"
GPU_USED = "ray_node_gram_used"
GPU_AVAILABLE = "ray_node_gram_available"
STARTED = "started"  # the first phase
WAITING = ("PENDING", "RESCHEDULING")
MEGABYTE = 1 << 20
ENGINE = re.compile("[0-9]{1,9}")
LARGEST = 1e15  # of a number of an event; one that a float cannot hold is not printed


@dataclass(frozen=True)
class EngineState:
    """An engine: its GPUs with node, tokens/s since the last sync, ratio to the median, and restarts."""

    index: int
    places: tuple[str, ...]
    tokens_per_second: float | None
    ratio: float | None
    restarts: int = 0


@dataclass(frozen=True)
class GpuMemory:
    """The memory of a GPU in bytes, as Ray's node agent reports it."""

    node: str
    index: str
    used: float
    total: float


@dataclass(frozen=True)
class PendingGroup:
    """A placement group that Ray has not placed: its bundles and Ray's reason."""

    id: str
    bundles: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class RunState:
    """The current state of a run; None or empty if unknown. ``sync`` in GB/s.

    ``lost_seconds`` are those in which it has waited for lost engines; all engines have ``weight_version``.
    """

    phase: str | None
    step: int | None
    reward: float | None
    sync: float | None
    engines: tuple[EngineState, ...]
    gpus: tuple[GpuMemory, ...]
    waiting: tuple[PendingGroup, ...]
    lost_seconds: float = 0.0
    weight_version: int | None = None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_number_or_none(value: Any) -> bool:
    return value is None or _is_number(value)


def _are_ranks(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(rank, Mapping) for rank in value)


FIELDS: Mapping[str, Mapping[str, Callable[[Any], bool]]] = {
    "phase": {"name": lambda value: isinstance(value, str)},
    "step": {"step": _is_number, "reward": _is_number_or_none},
    "sync": {"version": _is_number_or_none, "gigabytes_per_second": _is_number_or_none},
    "engine": {"engine": _is_number, "ranks": _are_ranks},
    "engine restart": {"engine": _is_number, "restarts": _is_number},
    "recovered": {"seconds": _is_number},
}


def is_well_formed(event: Mapping[str, Any]) -> bool:
    """Whether the fields that are read of this kind of event have the right types."""
    return all(check(event.get(name)) for name, check in FIELDS.get(event["event"], {}).items())


def is_usable(sample: Sample) -> bool:
    """Whether a sample has a number, and that of its engine if it is about one."""
    return abs(sample.value) <= LARGEST and (
        sample.name not in (RESTARTS, TOKENS) or bool(ENGINE.fullmatch(sample.tags.get("engine", "")))
    )


def newest_attempt(events: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The events since the driver of the last run, or of its last submission, has started."""
    begins = [
        index for index, event in enumerate(events) if event["event"] == "phase" and event["name"] == STARTED
    ]
    return events[begins[-1] :] if begins else events


def run_state(
    events: Sequence[Mapping[str, Any]], samples: Sequence[Sample], groups: Mapping[str, Mapping[str, Any]]
) -> RunState:
    """Derive the state; ``groups`` is the result of Ray's ``placement_group_table``.

    Events that are not `is_well_formed` and samples that are not `is_usable` are skipped.
    """
    samples = [one for one in samples if is_usable(one)]
    events = newest_attempt([one for one in events if is_well_formed(one)])
    phases, steps, syncs = (
        [one for one in events if one["event"] == kind] for kind in ("phase", "step", "sync")
    )
    rates = [sample.value for sample in samples if sample.name == SYNC_RATE]
    versions = [sample.value for sample in samples if sample.name == VERSION]
    version = syncs[-1].get("version") if syncs else max(versions, default=None)
    event_rate = syncs[-1].get("gigabytes_per_second") if syncs else None
    return RunState(
        phase=str(phases[-1]["name"]) if phases else None,
        step=int(steps[-1]["step"]) if steps else None,
        reward=steps[-1].get("reward") if steps else None,
        sync=event_rate if event_rate is not None else rates[-1] if rates else None,
        engines=engines(events, samples),
        gpus=gpus(samples),
        waiting=waiting(groups),
        lost_seconds=max(
            sum(float(one["seconds"]) for one in events if one["event"] == "recovered"),
            *(sample.value for sample in samples if sample.name == RECOVERY),
            0.0,
        ),
        weight_version=None if version is None else int(version),
    )


def engines(events: Sequence[Mapping[str, Any]], samples: Sequence[Sample]) -> tuple[EngineState, ...]:
    """The engines that events and metrics name, by index."""
    restarts: Counter[int] = Counter()
    for index, number in [
        *((one["engine"], one["restarts"]) for one in events if one["event"] == "engine restart"),
        *((one.tags["engine"], one.value) for one in samples if one.name == RESTARTS),
    ]:
        restarts[int(index)] = max(restarts[int(index)], int(number))
    rates = {int(s.tags["engine"]): s.value for s in samples if s.name == TOKENS and "engine" in s.tags}
    places = {
        int(event["engine"]): tuple(
            f"{rank.get('host', '?')} {rank.get('gpu', '?')}" for rank in event["ranks"]
        )
        for event in events
        if event["event"] == "engine"
    }
    median = statistics.median(rates.values()) if rates else 0.0
    return tuple(
        EngineState(
            index,
            places.get(index, ()),
            rates.get(index),
            rates[index] / median if index in rates and median else None,
            restarts[index],
        )
        for index in sorted(rates.keys() | places.keys())
    )


def gpus(samples: Iterable[Sample]) -> tuple[GpuMemory, ...]:
    """The memory of each GPU."""
    amounts: dict[tuple[str, str], dict[str, float]] = {}
    for sample in samples:
        if sample.name in (GPU_USED, GPU_AVAILABLE):
            amounts.setdefault((sample.node, sample.tags.get("gpuindex", "?")), {})[sample.name] = (
                sample.value
            )
    return tuple(
        GpuMemory(node, index, used[GPU_USED] * MEGABYTE, (used[GPU_USED] + used[GPU_AVAILABLE]) * MEGABYTE)
        for (node, index), used in sorted(amounts.items())
        if len(used) == 2
    )


def waiting(groups: Mapping[str, Mapping[str, Any]]) -> tuple[PendingGroup, ...]:
    """The pending placement groups; equal bundles are counted."""
    return tuple(
        PendingGroup(
            str(identifier),
            _counted(group["bundles"].values()),
            str(group.get("stats", {}).get("scheduling_state", "")),
        )
        for identifier, group in groups.items()
        if group["state"] in WAITING
    )


def _counted(bundles: Iterable[Mapping[str, float]]) -> tuple[str, ...]:
    texts = [", ".join(f"{name} {amount:g}" for name, amount in sorted(one.items())) for one in bundles]
    return tuple(f"{texts.count(text)} x {{{text}}}" for text in dict.fromkeys(texts))
