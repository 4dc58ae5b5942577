"""Comparison of every parameter between the trainer and its engines after a sync, by checksum."""

import functools
import time
from typing import Any

from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.config import env_vars
from rlhf_stack.sync import actor_waits
from rlhf_stack.sync.digest import Difference, RegionDigest, differences
from rlhf_stack.sync.engine_parameters import EngineParameter, engine_parameters
from rlhf_stack.sync.errors import SyncError, SyncMismatch
from rlhf_stack.sync.trainer import engine_indices, gathered, synced_names
from rlhf_stack.telemetry import events, run_log

MAX_LISTED = 5  # differences in the text of `SyncMismatch`


def verify_sync(trainer: Any, index: int, is_root: bool) -> None:
    """Compare the trainer's parameters with every engine's after sync ``index``, on every trainer rank.

    The root rank records the result as an event. `SyncMismatch` on the root rank if any parameter differs.
    """
    start = time.monotonic()
    parameters = synced_parameters(trainer)
    shapes = [(one.name, list(one.spec(trainer).shape)) for one in parameters]
    held: list[list[dict[str, list[RegionDigest]]]] = []  # by engine, rank and parameter
    rearranged: set[str] = set()
    found: list[Difference] = []
    failure: Exception | None = None
    if is_root:
        try:
            answers = actor_waits.wait_for_engine_results(
                [engine.call_workers.remote("weight_digests", shapes) for engine in trainer.vllm_engines],
                "the engines' checksums",
            )
            held = [[_by_name(rank["digests"]) for rank in ranks] for ranks in answers]
            rearranged.update(name for ranks in answers for rank in ranks for name in rank["rearranged"])
            found += _stale(answers)
        except (SyncError, PeerError) as error:
            failure = error  # this rank gathers with the other ranks to the end
    for one in parameters:
        with gathered(trainer, one.sources):
            if is_root and failure is None and one.name not in rearranged:
                digests = [[rank.get(one.name, []) for rank in ranks] for ranks in held]
                found += differences(one.name, one.value(), digests)
    if failure is not None:
        raise failure
    if is_root:
        names = sorted({difference.name for difference in found})
        events.emit(
            "verify",
            index=index,
            equal=not found,
            parameters=len(parameters) - len(rearranged),
            rearranged=len(rearranged),
            mismatched=names,
            seconds=time.monotonic() - start,
        )
        if rearranged and env_vars.sync_verification() != env_vars.PROBABILITIES:
            _warn_of_rearranged(len(rearranged), len(parameters))
        if found:
            raise SyncMismatch(_message(index, len(parameters), names, found, trainer))


def _stale(answers: list[list[dict[str, Any]]]) -> list[Difference]:
    """Return what this sync did not write, although the trainer sends it or an earlier sync wrote it."""
    return [
        Difference(name, engine, rank, "this sync did not write it")
        for engine, ranks in enumerate(answers)
        for rank, answer in enumerate(ranks)
        for name in answer["stale"]
    ]


@functools.cache
def _warn_of_rearranged(count: int, total: int) -> None:
    run_log.warning(
        f"{count} of {total} parameters have no checksum to compare, because vLLM rearranges them after "
        f"loading: {env_vars.VERIFY_SYNC}={env_vars.PROBABILITIES} compares what the model computes"
    )


def synced_parameters(trainer: Any) -> list[EngineParameter]:
    """Return what engines receive: all parameters, or only the trained ones of a vision-language model."""
    return engine_parameters(trainer, synced_names(trainer))


def _message(index: int, total: int, names: list[str], found: list[Difference], trainer: Any) -> str:
    nodes = actor_waits.wait_for_engine_results(
        [engine.where.remote() for engine in trainer.vllm_engines], "the engines' nodes"
    )
    lines = [f"after sync {index} {len(names)} of {total} parameters differ between trainer and engines:"]
    for difference in found[:MAX_LISTED]:
        ranks = nodes[difference.engine]
        holders = ranks if difference.rank is None else [ranks[difference.rank]]
        addresses = ", ".join(sorted({str(rank["node"]) for rank in holders}))
        rank = "all ranks" if difference.rank is None else f"rank {difference.rank}"
        engine = engine_indices(trainer)[difference.engine]
        lines.append(f"{difference.name}: engine {engine}, {rank} on {addresses}: {difference.what}")
    if len(found) > MAX_LISTED:
        lines.append(f"and {len(found) - MAX_LISTED} more")
    return "\n  ".join(lines)


def _by_name(values: list[dict[str, Any]]) -> dict[str, list[RegionDigest]]:
    digests: dict[str, list[RegionDigest]] = {}
    for value in values:
        digest = RegionDigest.from_dict(value)
        digests.setdefault(digest.name, []).append(digest)
    return digests
