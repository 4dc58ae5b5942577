"""Probes on a CPU that test whether the symptom of a row occurs with the installed packages.

``python -m rlhf_stack.known_bad.probes`` runs them all and prints for each row "holds", "gone" or "elsewhere"
(the row is about other versions) with the evidence. It starts its own Ray nodes.
"""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from rlhf_stack.config import env_vars
from rlhf_stack.known_bad.matching import canonical_names, explain
from rlhf_stack.known_bad.model import Row, load

HOLDS, GONE, ELSEWHERE = "holds", "gone", "elsewhere"
SHORT_SECONDS, LONG_SECONDS = 5.0, 120.0
GPUS, NODES = 8, 3
ACCELERATORS = "from ray._private.accelerators.amd_gpu import AMDGPUAcceleratorManager as amd\n"

Probe = Callable[[Row], Iterator[str]]  # yields evidence of the symptom, nothing if it does not occur


def rocr_is_refused(row: Row) -> Iterator[str]:
    """Query Ray for the visible GPUs of a process with ``ROCR_VISIBLE_DEVICES``."""
    code = ACCELERATORS + "amd.get_current_process_visible_accelerator_ids()"
    yield from _matching_output(row, code, ROCR_VISIBLE_DEVICES="0")


def hip_and_cuda_differ(row: Row) -> Iterator[str]:
    """Query Ray for the variable of visible GPUs while the two variables differ."""
    code = ACCELERATORS + "amd.get_visible_accelerator_ids_env_var()"
    yield from _matching_output(row, code, HIP_VISIBLE_DEVICES="0", CUDA_VISIBLE_DEVICES="1")


def interface_is_missing(row: Row) -> Iterator[str]:
    """Create a gloo group on an interface that does not exist."""
    code = (
        "import torch.distributed as group\n"
        "group.init_process_group('gloo', store=group.HashStore(), rank=0, world_size=1)"
    )
    yield from _matching_output(row, code, GLOO_SOCKET_IFNAME="eth9")


def code_fails(row: Row) -> Iterator[str]:
    """Run the code that the row carries."""
    yield from _matching_output(row, row.reproduce)


def lock_is_waited_for(row: Row) -> Iterator[str]:
    """Wait for an abandoned lock of torch; the traceback after a time limit shows the wait."""
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder, "lock")
        lock.touch()
        code = (
            "import faulthandler\nfrom torch.utils.file_baton import FileBaton\n"
            f"faulthandler.dump_traceback_later({SHORT_SECONDS}, exit=True)\n"
            f"FileBaton({str(lock)!r}).wait()"
        )
        yield from _matching_output(row, code)


def setup_commands_are_ignored(_: Row) -> Iterator[str]:
    """Create a runtime environment with a field that does not exist."""
    from ray.runtime_env import RuntimeEnv

    accepted = RuntimeEnv(setup_commands=["true"])
    yield f"accepted: {dict(accepted)}"


def operators_moved(_: Row) -> Iterator[str]:
    """Look for vLLM's compiled module under its old name."""
    if importlib.util.find_spec("vllm._C") is None:
        yield "no module vllm._C"


def bundles_are_out_of_order(_: Row) -> Iterator[str]:
    """Fill three nodes with a placement group, and check that the bundles of each node are contiguous."""
    order = json.loads(_ray("order"))
    runs = 1 + sum(one != other for one, other in itertools.pairwise(order))
    if runs > NODES:
        yield "".join(chr(ord("A") + node) for node in order)


def a_cpu_is_missing(_: Row) -> Iterator[str]:
    """Create a placement group that requests more CPUs than a node has."""
    state = json.loads(_ray("pending"))
    if state == "PENDING":
        yield f"{state} after {SHORT_SECONDS:g} s"


def actor_ignores_its_bundle(_: Row) -> Iterator[str]:
    """Pin actors without resources to bundles, and count those on the node of their bundle."""
    matching = json.loads(_ray("pinned"))
    if matching < NODES:
        yield f"{matching} of {NODES} actors are on the node of their bundle"


PROBES: dict[str, Probe] = {
    "deepspeed-build-lock": lock_is_waited_for,
    "gloo-no-such-interface": interface_is_missing,
    "ray-cannot-be-scheduled": a_cpu_is_missing,
    "ray-hip-cuda-differ": hip_and_cuda_differ,
    "ray-pack-order": bundles_are_out_of_order,
    "ray-rocr-refused": rocr_is_refused,
    "ray-setup-commands-ignored": setup_commands_are_ignored,
    "ray-zero-resource-actors": actor_ignores_its_bundle,
    "vllm-c-renamed": operators_moved,
}


def is_about(row: Row, versions: dict[str, str]) -> bool:
    """Whether the row applies to this accelerator and ``versions``; missing packages are ignored.

    Rows for ROCm are probed on a CPU too, because Ray's behaviour does not depend on the card.
    """
    if row.accelerator == "cuda" != env_vars.accelerator():
        return False
    known = {name: text for name, text in versions.items() if name in row.packages}
    return all(row.packages[name].contains(Version(text), prereleases=True) for name, text in known.items())


def run() -> dict[str, tuple[str, str]]:
    """Run the probes; return outcome and evidence by row id."""
    rows = {row.id: row for row in load()}
    versions = canonical_names({one.metadata["Name"]: one.version for one in metadata.distributions()})
    found = {}
    for name, probe in (PROBES | {name: code_fails for name, row in rows.items() if row.reproduce}).items():
        if not is_about(rows[name], versions):
            found[name] = (ELSEWHERE, "other versions")
            continue
        seen = next(probe(rows[name]), "")
        found[name] = (HOLDS, seen) if seen else (GONE, "the symptom did not occur")
    return found


def _matching_output(row: Row, code: str, **variables: str) -> Iterator[str]:
    """Run ``code`` in a new Python process; yield the lines of its output that match the row's symptoms."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=LONG_SECONDS,
        check=False,
    )
    yield from (finding.evidence for finding in explain([row], done.stdout + done.stderr))


def _ray(question: str) -> str:
    """The output of `on_nodes` in a process of its own, so that its Ray ends with it."""
    code = f"from rlhf_stack.known_bad import probes\nprobes.on_nodes({question!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_SECONDS, check=True
    )
    return done.stdout.splitlines()[-1]


def on_nodes(question: str) -> None:
    """Start nodes with simulated GPUs, run the probe ``question``, and print its result as JSON."""
    import ray
    from ray.cluster_utils import Cluster

    cpus = {"order": GPUS, "pending": 1, "pinned": GPUS}[question]
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": cpus, "num_gpus": GPUS, "object_store_memory": 100 << 20},
    )
    for _ in range(NODES - 1):
        cluster.add_node(num_cpus=cpus, num_gpus=GPUS, object_store_memory=100 << 20)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    answer = {"order": _order, "pending": _pending, "pinned": _pinned}[question]()
    ray.shutdown()  # which ends what Ray prints
    print(json.dumps(answer), flush=True)
    cluster.shutdown()


def _order() -> list[int]:
    """The index of the node of each bundle of a group that takes every GPU."""
    import ray

    group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * (GPUS * NODES), strategy="PACK")
    ray.get(group.ready(), timeout=LONG_SECONDS)
    places = ray.util.placement_group_table(group)["bundles_to_node_id"]
    names = [places[index] for index in sorted(places)]
    return [sorted(set(names)).index(name) for name in names]


def _pending() -> str:
    """The state after `SHORT_SECONDS` of a group that requests two CPUs on nodes with one."""
    import ray

    group = ray.util.placement_group([{"GPU": 2, "CPU": 2}])
    group.wait(SHORT_SECONDS)
    return str(ray.util.placement_group_table(group)["state"])


def _pinned() -> int:
    """The number of actors without resources on the node of their bundle."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * NODES, strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=LONG_SECONDS)
    places = ray.util.placement_group_table(group)["bundles_to_node_id"]

    class NodeProbe:
        def node(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    remote: Any = ray.remote(num_cpus=0, num_gpus=0)(NodeProbe)
    actors = [
        remote.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            )
        ).remote()
        for index in range(NODES)
    ]
    nodes = ray.get([actor.node.remote() for actor in actors], timeout=LONG_SECONDS)
    return sum(places[index] == node for index, node in enumerate(nodes))


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
