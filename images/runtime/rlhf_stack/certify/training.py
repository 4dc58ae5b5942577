"""The rungs ``train-separate`` and ``train-colocated``: steps of OpenRLHF's trainer with the demo's model."""

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.certify.ladder import Found, NotClimbedError, Place
from rlhf_stack.certify.model import Measurement
from rlhf_stack.certify.on_cluster import make_files, nodes_with_gpus, on_every_node
from rlhf_stack.certify.tuning import choose
from rlhf_stack.config import env_vars
from rlhf_stack.demo import tiny_run
from rlhf_stack.lazy import ray
from rlhf_stack.placement.reservation import free_nodes
from rlhf_stack.telemetry import events

STEPS = 2
HEADS = 2  # of the demo's model: the largest tensor parallelism of its engines
MICRO_BATCH = 16
COLOCATED = "hybrid"  # the demo's layout
SIDES = ("trainer", "engine")


@dataclass(frozen=True)
class Layout:
    """``ranks`` of the trainer on each of ``nodes``, and ``engines`` over ``size`` GPUs each."""

    nodes: int
    ranks: int
    engines: int
    size: int

    @property
    def arguments(self) -> list[str]:
        """Flags of OpenRLHF 0.11, which override those of the demo."""
        micro = str(max(1, min(MICRO_BATCH, tiny_run.BATCH // (self.nodes * self.ranks))))
        return [
            *("--actor.num_nodes", str(self.nodes), "--actor.num_gpus_per_node", str(self.ranks)),
            *("--vllm.num_engines", str(self.engines), "--vllm.tensor_parallel_size", str(self.size)),
            *("--train.micro_batch_size", micro, "--rollout.micro_batch_size", micro),
            *("--ds.attn_implementation", "flash_attention_2", "--ds.packing_samples"),
        ]


def layout(gpus: Sequence[int], colocated: bool) -> Layout:
    """The layout for nodes with these ``gpus``; the numbers of ranks and nodes are powers of two.

    Separate: the trainer on the first half of the nodes, or of the GPUs of a single one.
    """
    each = _power(min(*gpus, tiny_run.BATCH))
    nodes = _power(min(len(gpus), tiny_run.BATCH // each))
    size = min(HEADS, each)
    if colocated:
        return Layout(nodes, each, nodes * each // size, size)
    if nodes > 1:
        return Layout(nodes // 2, each, (nodes - nodes // 2) * each // size, size)
    ranks = _power(gpus[0] // 2)
    size = min(HEADS, ranks)
    return Layout(1, ranks, ranks // size, size)


def _power(count: int) -> int:
    """The largest power of two that is at most ``count``."""
    return 1 << (count.bit_length() - 1)


def separate(place: Place) -> Found:
    """Train with engines on GPUs of their own."""
    return _train(place, "separate")


def colocated(place: Place) -> Found:
    """Train with engines on the trainer's GPUs, which sleep meanwhile, and check that no rank waits then."""
    return _train(place, COLOCATED)


def _train(place: Place, name: str) -> Found:
    generation = tiny_run.installed()
    if name not in generation.layouts:
        raise NotClimbedError(
            "this release of OpenRLHF has no engines on the trainer's GPUs that sync by IPC"
        )
    with nodes_with_gpus(place) as nodes:
        gpus = [int(node.total_gpus) for node in nodes]
        changes = _changes(name, gpus, generation.reward_model)
        folder = make_files(place, nodes, STEPS)
        arguments = [*tiny_run.train_arguments(name, folder, STEPS, seed=0), *changes]
        written = Path(place.folder, f"events-{name}")
        variables = {env_vars.VERIFY_SYNC: "1", env_vars.EVENTS: str(written), "HF_HUB_OFFLINE": "1"}
        if name == COLOCATED:
            variables[env_vars.CHECK_COTENANCY] = "1"
        chosen = choose(nodes, arguments)
        start = time.monotonic()
        code = subprocess.call(
            [
                sys.executable,
                "-m",
                "rlhf_stack.certify.training",
                place.address,
                json.dumps(variables),
                *arguments,
            ]
        )
        seconds = time.monotonic() - start
        problem = f"the trainer ended with exit code {code}: see the log" if code else ""
        try:
            everywhere = free_nodes()  # the driver, here, may be on a node without GPUs
            found = distinct(on_every_node(everywhere, events.read, written))
        except RuntimeError as error:
            raise RuntimeError("; ".join(filter(None, [problem, str(error)]))) from error
    if code:
        raise RuntimeError("; ".join([problem, *violations(found)]))
    run = judged(found, seconds, arguments)
    watched = contention(found) if name == COLOCATED else Found([])
    problems = [run.problem, watched.problem, *(f"tune: {problem}" for problem in chosen["problems"])]
    return Found(
        [*run.measurements, *watched.measurements],
        run.details | watched.details | {"tune": chosen},
        "; ".join(filter(None, problems)),
    )


def contention(found: Sequence[Mapping[str, Any]]) -> Found:
    """What the events show of the check for GPU contention: it was active on both sides, and found none."""
    watched = {
        side: sorted({str(event["gpu"]) for event in found if _is_check(event, side)}) for side in SIDES
    }
    problems = [f"no {side} checked its GPU for contention" for side, gpus in watched.items() if not gpus]
    shared = set(watched["trainer"]) & set(watched["engine"])
    if not problems and not shared:
        problems = ["no GPU was checked for contention by the trainer and by an engine"]
    return Found(
        [Measurement("GPUs checked for contention", len(shared))],
        {"contention": watched},
        "; ".join([*problems, *violations(found)]),
    )


def _is_check(event: Mapping[str, Any], side: str) -> bool:
    return (event["event"], event.get("side")) == ("cotenancy", side)


def violations(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each GPU on which an engine generated while the trainer waited, with the first collectives."""
    first = {
        str(event["gpu"]): ", ".join(event["collectives"])
        for event in reversed(found)
        if event["event"] == "cotenancy violated"
    }
    return [
        f"an engine generated on GPU {gpu} while the trainer waited there: {what}"
        for gpu, what in first.items()
    ]


def _changes(name: str, gpus: Sequence[int], is_flat: bool) -> list[str]:
    """Flags in addition to those of the demo, for this cluster; `NotClimbedError` if it is too small."""
    colocated = name == COLOCATED
    if is_flat:
        roles = 2  # actor with reference, critic with reward model: a GPU each
        if sum(gpus) <= roles:
            raise NotClimbedError(f"{sum(gpus)} GPUs: two roles and an engine need one each")
        return ["--vllm_num_engines", str(min(sum(gpus), tiny_run.BATCH) - roles)]
    if not colocated and sum(gpus) < 2:
        raise NotClimbedError("one GPU: the trainer has it, and there is no other for an engine")
    if not devices.is_gpu():
        return layout(gpus, colocated).arguments
    backend = [] if colocated else ["--vllm.sync_backend", "nccl"]
    return [*layout(gpus, colocated).arguments, *backend, "--vllm.gpu_memory_utilization", "0.3"]


def distinct(found: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The events of all nodes by time; nodes that share a file system return the same ones."""
    by_text = {json.dumps(event, sort_keys=True): dict(event) for several in found for event in several}
    return sorted(by_text.values(), key=lambda event: float(event["time"]))


def judged(found: Sequence[Mapping[str, Any]], seconds: float, arguments: Sequence[str]) -> Found:
    """What the events of a run show: all steps were taken, and the weights were equal after each sync."""

    def of(name: str) -> list[Mapping[str, Any]]:
        return [event for event in found if event["event"] == name]

    steps, syncs, verified = of("step"), of("sync"), of("verify")
    problems = []
    if [event["step"] for event in steps] != list(range(1, STEPS + 1)):
        problems.append(f"{len(steps)} of {STEPS} steps were taken")
    if len(verified) < STEPS or len(verified) != len(syncs):
        problems.append(f"{len(verified)} of {len(syncs)} syncs were verified, {STEPS} or more were expected")
    unequal = sorted({name for event in verified if not event["equal"] for name in event["mismatched"]})
    if unequal:
        problems.append(f"weights differ: {', '.join(unequal[:5])}")
    straddling = [event["engine"] for event in of("engine") if event["straddles"]]
    if not of("engine"):
        problems.append("no engine reported where it runs")
    if straddling:
        problems.append(f"engines straddle nodes: {straddling}")
    measurements = [
        Measurement("seconds in total", seconds, "s"),
        Measurement("parameters compared", sum(event["parameters"] for event in verified)),
        Measurement("engines", len(of("engine"))),
    ]
    if syncs:
        measurements.append(Measurement("slowest sync", max(event["seconds"] for event in syncs), "s"))
    backends = sorted({event["backend"] for event in syncs})
    kept = [dict(event) for event in (*steps, *syncs, *verified, *of("engine"), *of("placement"))]
    return Found(
        measurements,
        {"arguments": list(arguments), "backends": backends, "events": kept},
        "; ".join(problems),
    )


def main() -> None:
    """Be the driver of a run: the trainer's own module, with variables for all processes of its job."""
    _, address, variables, *arguments = sys.argv
    os.environ.update(json.loads(variables))
    ray.init(address=address, runtime_env={"env_vars": json.loads(variables)})
    sys.argv = ["train_ppo_ray", *arguments]
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")


if __name__ == "__main__":
    main()
