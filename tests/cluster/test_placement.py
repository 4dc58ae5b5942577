"""Placement on Ray nodes with simulated GPUs: Ray's own order, and the reservation of plans.

One cluster serves all tests. Groups pinned to the nodes occupy the GPUs that a layout does not have.
"""

import time
from contextlib import contextmanager

import pytest
from rlhf_stack import placement
from rlhf_stack.config import env_vars
from rlhf_stack.placement import Engines, Group, PlacementError, Request, reservation
from rlhf_stack.planning.upstream_placement import pack

ray = pytest.importorskip("ray")

NODES, GPUS, CPUS = 4, 8, 64
MEGABYTE = 1 << 20
SECONDS = 180
READY_SECONDS = 60
# Ray permutes three or more nodes with more than 16 bundles (see planning/test_upstream_placement.py).
LAYOUTS = [(2, 2, 0, 0), (8, 8, 0, 0), (6, 6, 6, 0), (8, 8, 8, 8), (6, 6, 8, 4), (3, 8, 5, 8)]


@pytest.fixture(scope="module")
def nodes():
    """Start a head without GPUs and four nodes with 8 GPUs; yield the addresses of the four."""
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


def wait_for_free_gpus(gpus):
    """Wait until Ray's delayed view shows ``gpus`` free GPUs on the nodes."""
    end = time.monotonic() + READY_SECONDS
    while (found := [node.gpus for node in reservation.free_nodes() if node.total_gpus]) != list(gpus):
        assert time.monotonic() < end, f"{found} instead of {gpus} GPUs are free"
        time.sleep(0.05)


@contextmanager
def free(addresses, gpus, cpus=CPUS):
    """Leave only ``gpus`` GPUs and ``cpus`` CPUs free on each node."""
    occupied = [
        {"GPU": GPUS - count, "CPU": CPUS - cpus, f"node:{address}": 0.001}
        for address, count in zip(addresses, gpus, strict=True)
    ]
    others = ray.util.placement_group(
        [{name: amount for name, amount in bundle.items() if amount} for bundle in occupied]
    )
    try:
        assert others.wait(READY_SECONDS)
        wait_for_free_gpus(gpus)
        yield
    finally:
        from ray.util.placement_group import PlacementGroup

        for number, entry in ray.util.placement_group_table().items():
            if entry["state"] != "REMOVED":
                ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number))))
        wait_for_free_gpus([GPUS] * NODES)


def node_addresses(group):
    """Return the address of the node of each bundle."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return [addresses[node] for node in reservation._bundle_nodes(group)]


def letters(names):
    """Return nodes as letters, in order of first appearance."""
    by_name = {name: chr(ord("A") + index) for index, name in enumerate(dict.fromkeys(names))}
    return "".join(by_name[name] for name in names)


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("gpus", LAYOUTS, ids=str)
def test_rays_own_order_is_predicted(nodes, gpus):
    with free(nodes, gpus):
        predicted = pack(reservation.free_nodes(), sum(gpus))
        group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * sum(gpus), strategy="PACK")
        assert group.wait(READY_SECONDS)
        assert letters(node_addresses(group)) == letters(predicted)


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(
    ("gpus", "request_"),
    [
        ((2, 2, 0, 0), Request((Group("actor", 1, 2),), Engines(1, 2))),
        ((2, 2, 0, 0), Request((Group("actor", 2, 2),), Engines(2, 2, "actor"))),
        ((6, 6, 6, 0), Request((Group("actor", 1, 6),), Engines(3, 4))),
        ((6, 6, 6, 0), Request((Group("actor", 3, 4),), Engines(3, 4, "actor"))),
        ((8, 8, 8, 8), Request((Group("actor", 4, 8),), Engines(8, 4, "actor"), tp_sp_size=8)),
        ((3, 8, 5, 8), Request((Group("actor", 1, 4),), Engines(5, 4))),
        ((8, 8, 4, 8), Request((Group("actor", 1, 12),), Engines(1, 16))),
        ((7, 1, 1, 0), Request((Group("actor", 1, 2), Group("ref", 1, 2)), Engines(5, 1))),
    ],
    ids=str,
)
def test_bundles_are_on_their_planned_nodes(nodes, gpus, request_):
    with free(nodes, gpus):
        found = reservation.free_nodes()
        planned = placement.plan(found, request_)
        groups = placement.reserve(request_)
        for name, bundles in planned.bundles.items():
            if name == "engines":
                continue
            assert node_addresses(groups[name]) == [found[node].address for node in bundles]
            assert placement.rank_bundles(groups[name]) == list(range(len(bundles)))
        of_engines = groups[request_.engines.shares or "engines"]
        for engine in range(request_.engines.count):
            group, own = placement.engine_place(of_engines, engine, request_.engines.size)
            found_on = [node_addresses(group)[bundle] for bundle in own]
            assert found_on == [found[node].address for node in planned.engines[engine]]
            assert len(set(found_on)) == (2 if request_.engines.size > GPUS else 1)


@pytest.mark.timeout(SECONDS)
def test_the_groups_of_engines_fit_next_to_strictly_spread_groups(nodes):
    request = Request((Group("actor", 3, 2, strict_spread=True),), Engines(3, 4))
    with free(nodes, (6, 6, 6, 0)):
        groups = placement.reserve(request)
        assert node_addresses(groups["actor"]) == [address for address in nodes[:3] for _ in range(2)]
        assert sorted(node_addresses(group) for group in groups["engines"]) == [
            [address] * 4 for address in nodes[:3]
        ]


@pytest.mark.timeout(SECONDS)
def test_unplanned_strictly_spread_group_has_a_rank_for_each_gpu(nodes, monkeypatch):
    monkeypatch.setenv(env_vars.PLACEMENT_TIMEOUT, "3")
    with free(nodes, (8, 8, 2, 0)):
        group = ray.util.placement_group([{"GPU": 4, "CPU": 4}] * 2, strategy="STRICT_SPREAD")
        placement.wait_for_placement_group(group, "actor")
        assert placement.rank_bundles(group) == [0] * 4 + [1] * 4
        other = ray.util.placement_group([{"GPU": 4, "CPU": 4}] * 3, strategy="STRICT_SPREAD")
        with pytest.raises(PlacementError, match=r"(?s)Ray reports .*GPUs"):
            placement.wait_for_placement_group(other, "critic")


@pytest.mark.timeout(SECONDS)
def test_engine_actor_is_on_the_node_of_its_first_bundle(nodes):
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    @ray.remote
    class Driver:
        def node(self):
            return ray.util.get_node_ip_address()

    with free(nodes, (6, 6, 6, 0)):
        groups = placement.reserve_engines(3, 4)
        drivers = [
            Driver.options(
                num_cpus=placement.driver_cpus(0),
                num_gpus=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            ).remote()
            for group in groups
        ]
        found = ray.get([driver.node.remote() for driver in drivers], timeout=90)
        assert found == [node_addresses(group)[0] for group in groups]


@pytest.mark.timeout(SECONDS)
def test_failed_reservation_leaves_nothing_reserved(nodes, monkeypatch):
    monkeypatch.setenv(env_vars.PLACEMENT_TIMEOUT, "3")
    with free(nodes, (6, 6, 0, 0)):
        with pytest.raises(PlacementError, match="only 2 of 3 engines of 4 GPUs fit"):
            placement.reserve(Request(engines=Engines(3, 4)))
        wait_for_free_gpus((6, 6, 0, 0))


@pytest.mark.timeout(SECONDS)
def test_the_place_of_one_engine_is_released(nodes):
    with free(nodes, (6, 6, 0, 0)):
        one, _ = placement.reserve_engines(2, 4)
        (address,) = set(node_addresses(one))
        reservation.release(one.id.hex())
        wait_for_free_gpus([6 if node == address else 2 for node in nodes[:2]] + [0, 0])


@pytest.mark.timeout(SECONDS)
def test_plan_on_stale_resources_is_repeated(nodes, monkeypatch):
    with free(nodes, (6, 6, 6, 6)):
        stale = [reservation.free_nodes()]
        current = reservation._nodes
        taken = placement.reserve(Request((Group("actor", 1, 6),)))["actor"]
        monkeypatch.setattr(
            reservation,
            "_nodes",
            lambda free, *variables: stale.pop() if free and stale else current(free, *variables),
        )
        group = placement.reserve(Request((Group("critic", 1, 6),)))["critic"]
        assert not stale
        assert set(node_addresses(group)).isdisjoint(node_addresses(taken))


@pytest.mark.timeout(SECONDS)
def test_allowed_straddling_is_logged(nodes, monkeypatch, caplog):
    monkeypatch.setenv(env_vars.ALLOW_STRADDLE, "1")
    with free(nodes, (6, 6, 0, 0)):
        *_, last = placement.reserve(Request(engines=Engines(3, 4)))["engines"]
        assert "engine 2" in caplog.text
        assert "straddles nodes" in caplog.text
        assert len(set(node_addresses(last))) == 2


@pytest.mark.timeout(SECONDS)
def test_group_that_cannot_be_placed_is_an_error_at_the_deadline(nodes, monkeypatch):
    monkeypatch.setenv(env_vars.PLACEMENT_TIMEOUT, "3")
    with free(nodes, (8, 8, 0, 0), cpus=4):
        group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * 17)
        with pytest.raises(
            PlacementError, match=r"(?s)Ray reports NO_RESOURCES: .*17 GPUs.*127\.0\.1\.1: 8 of 8 GPUs"
        ):
            placement.wait_for_placement_group(group, "actor")


@pytest.mark.timeout(SECONDS)
def test_unplanned_group_is_split_by_node(nodes):
    with free(nodes, (8, 8, 8, 0)):
        group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * 24)
        placement.wait_for_placement_group(group, "engines")
        addresses = node_addresses(group)
        ranks = [addresses[bundle] for bundle in placement.rank_bundles(group)]
        assert letters(ranks) == "A" * 8 + "B" * 8 + "C" * 8
        for engine in range(3):
            assert len({addresses[bundle] for bundle in placement.engine_place(group, engine, 8)[1]}) == 1
