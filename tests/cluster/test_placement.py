"""Placement on Ray's nodes with GPUs that are not there: what Ray does by itself, and what we make it do.

One cluster serves all tests: what a layout lacks is taken by groups that are pinned to the nodes.
"""

import time
from contextlib import contextmanager

import pytest
from rlhf_stack import placement
from rlhf_stack.config import env_vars
from rlhf_stack.placement import Engines, Group, PlacementError, Request
from rlhf_stack.placement import reservation as edge
from rlhf_stack.planning.upstream_placement import pack

ray = pytest.importorskip("ray")

NODES, GPUS, CPUS = 4, 8, 64
MEGABYTE = 1 << 20
SECONDS = 180
READY_SECONDS = 60
# Three nodes and more with more than 16 bundles are permuted; see tests/unit/test_placement_upstream.py.
LAYOUTS = [(2, 2, 0, 0), (8, 8, 0, 0), (6, 6, 6, 0), (8, 8, 8, 8), (6, 6, 8, 4), (3, 8, 5, 8)]


@pytest.fixture(scope="module")
def nodes():
    """The addresses of four nodes with 8 GPUs, beside a head that has none."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=1, num_gpus=0, object_store_memory=80 * MEGABYTE, include_dashboard=False)
        addresses = [f"127.0.1.{index + 1}" for index in range(NODES)]
        for address in addresses:
            cluster.add_node(
                num_cpus=CPUS, num_gpus=GPUS, object_store_memory=80 * MEGABYTE, node_ip_address=address
            )
        ray.init(address=cluster.address, log_to_driver=False)
        yield addresses
    finally:
        ray.shutdown()
        cluster.shutdown()


def settled(gpus):
    """Waits until the view of the cluster, which lags behind, shows so many free GPUs on each node."""
    end = time.monotonic() + READY_SECONDS
    while (found := [node.gpus for node in edge.nodes_now() if node.total_gpus]) != list(gpus):
        assert time.monotonic() < end, f"{found} instead of {gpus} GPUs are free"
        time.sleep(0.05)


@contextmanager
def left(addresses, gpus, cpus=CPUS):
    """So many GPUs are left on each node, and so many CPUs."""
    wanted = [
        {"GPU": GPUS - free, "CPU": CPUS - cpus, f"node:{address}": 0.001}
        for address, free in zip(addresses, gpus, strict=True)
    ]
    others = ray.util.placement_group(
        [{name: amount for name, amount in bundle.items() if amount} for bundle in wanted]
    )
    try:
        assert others.wait(READY_SECONDS)
        settled(gpus)
        yield
    finally:
        from ray.util.placement_group import PlacementGroup

        for number, entry in ray.util.placement_group_table().items():
            if entry["state"] != "REMOVED":
                ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number))))
        settled([GPUS] * NODES)


def where(group):
    """The address of the node of each bundle."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return [addresses[node] for node in edge._bundle_nodes(group)]


def letters(names):
    """Nodes as letters, in the order in which they first come."""
    known = {name: chr(ord("A") + index) for index, name in enumerate(dict.fromkeys(names))}
    return "".join(known[name] for name in names)


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("gpus", LAYOUTS, ids=str)
def test_rays_own_order_is_foretold(nodes, gpus):
    with left(nodes, gpus):
        foretold = pack(edge.nodes_now(), sum(gpus))
        group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * sum(gpus), strategy="PACK")
        assert group.wait(READY_SECONDS)
        assert letters(where(group)) == letters(foretold)


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("gpus", "request_"),
    [
        ((2, 2, 0, 0), Request((Group("actor", 1, 2),), Engines(1, 2))),
        ((2, 2, 0, 0), Request((Group("actor", 2, 2),), Engines(2, 2, "actor"))),
        ((6, 6, 6, 0), Request((Group("actor", 1, 6),), Engines(3, 4))),
        ((6, 6, 6, 0), Request((Group("actor", 3, 4),), Engines(3, 4, "actor"))),
        ((8, 8, 8, 8), Request((Group("actor", 4, 8),), Engines(8, 4, "actor"), block=8)),
        ((3, 8, 5, 8), Request((Group("actor", 1, 4),), Engines(5, 4))),
        ((8, 8, 4, 8), Request((Group("actor", 1, 12),), Engines(1, 16))),
        ((7, 1, 1, 0), Request((Group("actor", 1, 2), Group("ref", 1, 2)), Engines(5, 1))),
    ],
    ids=str,
)
def test_every_bundle_is_where_the_plan_has_it(nodes, gpus, request_):
    with left(nodes, gpus):
        there = edge.nodes_now()
        planned = placement.plan(there, request_)
        made = placement.reserve(request_)
        for name, bundles in planned.bundles.items():
            assert where(made[name]) == [there[node].address for node in bundles]
            assert placement.rank_bundles(made[name]) == list(range(len(bundles)))
        group = made[request_.engines.shares or "engines"]
        for engine in range(request_.engines.count):
            own = placement.engine_bundles(group, engine, request_.engines.size)
            assert len({where(group)[bundle] for bundle in own}) == (2 if request_.engines.size > GPUS else 1)


@pytest.mark.timeout(SECONDS)
def test_engines_that_are_apart_have_groups_of_their_own_beside_groups_of_whole_nodes(nodes):
    request = Request((Group("actor", 3, 2, spread=True),), Engines(3, 4, apart=True))
    with left(nodes, (6, 6, 6, 0)):
        made = placement.reserve(request)
        assert where(made["actor"]) == [address for address in nodes[:3] for _ in range(2)]
        assert sorted(where(group) for group in made["engines"]) == [[address] * 4 for address in nodes[:3]]


@pytest.mark.timeout(SECONDS)
def test_a_group_of_whole_nodes_that_nobody_planned_has_a_rank_for_each_gpu(nodes, monkeypatch):
    monkeypatch.setenv(env_vars.PLACEMENT_TIMEOUT, "3")
    with left(nodes, (8, 8, 2, 0)):
        group = ray.util.placement_group([{"GPU": 4, "CPU": 4}] * 2, strategy="STRICT_SPREAD")
        placement.wait(group, "actor")
        assert placement.rank_bundles(group) == [0] * 4 + [1] * 4
        other = ray.util.placement_group([{"GPU": 4, "CPU": 4}] * 3, strategy="STRICT_SPREAD")
        with pytest.raises(PlacementError, match=r"(?s)Ray says .*GPUs"):
            placement.wait(other, "critic")


@pytest.mark.timeout(SECONDS)
def test_the_driver_of_an_engine_is_on_the_node_of_its_first_bundle(nodes):
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    @ray.remote
    class Driver:
        def node(self):
            return ray.util.get_node_ip_address()

    with left(nodes, (6, 6, 6, 0)):
        group = placement.reserve_engines(3, 4)
        first = [placement.engine_bundles(group, engine, 4)[0] for engine in range(3)]
        drivers = [
            Driver.options(
                num_cpus=placement.driver_cpus(0),
                num_gpus=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                ),
            ).remote()
            for bundle in first
        ]
        found = ray.get([driver.node.remote() for driver in drivers], timeout=90)
        assert found == [where(group)[bundle] for bundle in first]


@pytest.mark.timeout(SECONDS)
def test_a_refusal_leaves_nothing_reserved(nodes):
    with left(nodes, (6, 6, 0, 0)):
        with pytest.raises(PlacementError, match="only 2 of 3 engines of 4 GPUs fit"):
            placement.reserve(Request(engines=Engines(3, 4)))
        settled((6, 6, 0, 0))


@pytest.mark.timeout(SECONDS)
def test_a_plan_on_what_was_already_taken_is_made_again(nodes, monkeypatch):
    with left(nodes, (6, 6, 6, 6)):
        late = [edge.nodes_now()]
        now = edge._nodes
        taken = placement.reserve(Request((Group("actor", 1, 6),)))["actor"]
        monkeypatch.setattr(edge, "_nodes", lambda free: late.pop() if free and late else now(free))
        made = placement.reserve(Request((Group("critic", 1, 6),)))["critic"]
        assert not late
        assert set(where(made)).isdisjoint(where(taken))


@pytest.mark.timeout(SECONDS)
def test_straddling_on_request_is_told(nodes, monkeypatch, caplog):
    monkeypatch.setenv(env_vars.ALLOW_STRADDLE, "1")
    with left(nodes, (6, 6, 0, 0)):
        group = placement.reserve(Request(engines=Engines(3, 4)))["engines"]
        assert "engine 2" in caplog.text
        assert "straddles nodes" in caplog.text
        assert len(set(where(group)[8:])) == 2


@pytest.mark.timeout(SECONDS)
def test_a_group_without_a_place_says_what_is_missing_within_the_deadline(nodes, monkeypatch):
    monkeypatch.setenv(env_vars.PLACEMENT_TIMEOUT, "3")
    with left(nodes, (8, 8, 0, 0), cpus=4):
        group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * 17)
        with pytest.raises(
            PlacementError, match=r"(?s)Ray says NO_RESOURCES: .*17 GPUs.*127\.0\.1\.1: 8 of 8 GPUs"
        ):
            placement.wait(group, "actor")


@pytest.mark.timeout(SECONDS)
def test_a_group_that_nobody_planned_is_cut_by_node(nodes):
    with left(nodes, (8, 8, 8, 0)):
        group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * 24)
        placement.wait(group, "engines")
        there = where(group)
        ranks = [there[bundle] for bundle in placement.rank_bundles(group)]
        assert letters(ranks) == "A" * 8 + "B" * 8 + "C" * 8
        for engine in range(3):
            assert len({there[bundle] for bundle in placement.engine_bundles(group, engine, 8)}) == 1
