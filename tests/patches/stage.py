# After preamble.py, the start of every probe of placement: three Ray nodes with simulated GPUs.
import os
import sys
import time
import types

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group_table

NODES, GPUS, CPUS, MEGABYTE = 3, 8, 32, 1 << 20


def started():
    nodes = Cluster()
    try:
        for index in range(NODES):
            address = {"node_ip_address": f"127.0.1.{index + 1}"} if index else {}
            limits = {"object_store_memory": 80 * MEGABYTE, "include_dashboard": False}
            nodes.add_node(num_cpus=CPUS, num_gpus=GPUS, **limits, **address)
    except Exception:
        nodes.shutdown()
        raise
    return nodes


cluster = patiently(started)  # noqa: F821 of preamble.py
ray.init(address=cluster.address, log_to_driver=False)
NODE_IDS = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes()}
PINS = sorted(NODE_IDS)
os.environ["RLHF_STACK_PLACEMENT_TIMEOUT"] = "5"


class Planned(Exception):
    pass


bound(20, "waited for ever")  # noqa: F821 of preamble.py


@stub("an actor")  # noqa: F821 of preamble.py
class Handle:
    # Every method returns at once, with an address and a port.
    def __getattr__(self, _):
        def remote(*_, **__):
            return ray.put(("127.0.0.1", 1))

        return types.SimpleNamespace(remote=remote)


@stub("an actor class, which starts nothing")  # noqa: F821 of preamble.py
class Recorded:
    # Records the options of each actor, and starts nothing.
    def __init__(self, name):
        self.__name__, self.made = name, []
        self.__ray_metadata__ = types.SimpleNamespace(class_name=name)

    def options(self, **options):
        def remote(*_, **arguments):
            self.made.append((options, arguments))
            return Handle()

        return types.SimpleNamespace(remote=remote)

    def where(self):
        # The node of the bundle that each actor was given, in the order in which they were made.
        return [node_of(options["scheduling_strategy"]) for options, _ in self.made]


def node_of(strategy, bundle=None):
    index = strategy.placement_group_bundle_index if bundle is None else bundle
    return placement_group_table(strategy.placement_group)["bundles_to_node_id"][index]


def stage(free, run, cpus=CPUS):
    # Runs with ``free`` GPUs left on the nodes, and returns "" or the problem.
    pinned = [(left, f"node:{address}") for left, address in zip(free, PINS, strict=True)]
    taken = [{"GPU": GPUS - left, "CPU": CPUS - cpus, pin: 0.001} for left, pin in pinned]
    taken = [{name: amount for name, amount in bundle.items() if amount} for bundle in taken]
    others = ray.util.placement_group(taken)
    assert others.wait(30)
    await_free(gpus=sum(free), cpus=NODES * cpus)
    before = set(ray.util.placement_group_table())

    try:
        return run()
    finally:
        for number in set(ray.util.placement_group_table()) - before | {others.id.hex()}:
            if ray.util.placement_group_table()[number]["state"] != "REMOVED":
                ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number))))
        await_free(gpus=NODES * GPUS, cpus=NODES * CPUS)


def await_free(gpus, cpus):
    # Ray reports what was taken or released with a delay, for each node and resource separately.
    until = time.monotonic() + 30
    while time.monotonic() < until:
        free = ray.available_resources()
        if (free.get("GPU", 0), free.get("CPU", 0)) == (gpus, cpus):
            return
        time.sleep(0.05)
    raise AssertionError(f"expected {gpus} GPUs and {cpus} CPUs free after 30 s, and Ray reports {free}")


def few_cpus(make, *arguments):
    # On nodes with fewer CPUs than requested.
    try:
        make(*arguments)
    except TimeoutError as error:
        return f"fewer CPUs than GPUs: {error}"
    except RuntimeError as error:
        if "CPUs are missing" not in str(error):
            raise
    return ""


def stop(*_, **__):
    raise Planned


def finish(problems):
    ray.shutdown()
    cluster.shutdown()
    problems = [problem for problem in problems if problem]
    print("; ".join(problems) or "nothing straddles, and an unsatisfiable request is an error")
    sys.exit(bool(problems))
