"""rlhf_stack.diagnostics.network_check: verdicts on measured links, and their remedies."""

import socket
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.diagnostics.network_adapters import RdmaAdapter
from rlhf_stack.diagnostics.network_check import (
    Attempt,
    CheckedNode,
    Interface,
    NetworkReport,
    cluster,
    model,
    probe,
    ranks,
    sampling,
)
from rlhf_stack.errors import UserError
from rlhf_stack.placement import Engines, FreeNode, Group, Request
from rlhf_stack.sync.encoding import refuse_gloo_only
from rlhf_stack.sync.errors import SyncError

SLOW_CARD = Interface("eth0", "10.0.0.1", "10.0.0.0/24", 1000)
FAST_CARD = Interface("ib0", "10.1.0.1", "10.1.0.0/24", 200_000)
FLOOR = 0.1


@pytest.fixture(autouse=True)
def image(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe asks whether it has a GPU, and sets variables, which are restored after the test."""
    monkeypatch.setenv(env_vars.ACCELERATOR, "cpu")
    for name in (env_vars.SYNC_TIMEOUT, env_vars.SYNC_SPARSE, env_vars.SYNC_SOURCES):
        monkeypatch.setenv(name, "")


def node(number: int, *cards: Interface, used: str = "") -> CheckedNode:
    """A node whose interfaces end in its number; the first is its Ray address."""
    own = tuple(replace(card, address=f"{card.address.rpartition('.')[0]}.{number}") for card in cards)
    return CheckedNode(own[0].address, f"host{number}", own, used)


def sent(sender: int, receiver: int, rate: float = 1.0) -> Attempt:
    """A bucket of 64 MB that arrived at ``rate`` GB/s."""
    size = 64_000_000
    return Attempt(sender, (receiver,), size, 0.1, (size / rate / 1e9,))


def failed(sender: int, receiver: int, error: str = "no response in time") -> Attempt:
    """A failed transfer."""
    return Attempt(sender, (receiver,), error=error)


def verdicts(*attempts: Attempt, nodes: int = 2) -> list[str]:
    """The verdict on each pair of nodes, in order."""
    machines = [node(number, SLOW_CARD) for number in range(1, nodes + 1)]
    return [link.verdict for link in model.judge_links(machines, attempts, FLOOR, "gloo")]


@given(st.integers(1, 40))
def test_every_pair_occurs_once_and_a_node_once_per_round(count: int) -> None:
    """Round robin."""
    found = model.round_robin(count)
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(count), 2))
    for pairs in found:
        assert len({member for pair in pairs for member in pair}) == 2 * len(pairs)
    assert len(found) <= count


def test_a_link_is_ok_slow_one_way_or_dead() -> None:
    """The verdict depends on both directions."""
    assert verdicts(sent(0, 1), sent(1, 0)) == [model.OK]
    assert verdicts(sent(0, 1), sent(1, 0, FLOOR / 2)) == [model.SLOW]
    assert verdicts(sent(0, 1), failed(1, 0)) == [model.ONE_WAY]
    assert verdicts(failed(0, 1), failed(1, 0)) == [model.DEAD]
    assert verdicts(sent(0, 1), replace(sent(1, 0), wrong=(0,))) == [model.WRONG]


def test_a_link_far_below_the_median_is_slow() -> None:
    """The link is slow even if its rate is above the floor."""
    attempts = [sent(a, b) for a, b in ((0, 1), (1, 0), (0, 2), (2, 0))] + [sent(1, 2, 0.4), sent(2, 1, 0.4)]
    assert verdicts(*attempts, nodes=3) == [model.OK, model.OK, model.SLOW]


def test_a_failure_is_reported_with_its_direction() -> None:
    """The message has the host names and the error."""
    machines = [node(1, SLOW_CARD), node(2, SLOW_CARD)]
    (link,) = model.judge_links(machines, [sent(0, 1), failed(1, 0, "connection refused")], FLOOR, "gloo")
    assert link.floor == FLOOR
    assert link.why == "host2 to host1: connection refused"
    assert link.forth == pytest.approx(1.0)
    assert link.back is None


def ethernet(megabits: int | None) -> tuple[CheckedNode, CheckedNode]:
    """Two nodes with one interface of this speed each."""
    card = replace(SLOW_CARD, megabits=megabits)
    return node(1, card), node(2, card)


def infiniband(first: int | None, second: int | None) -> tuple[CheckedNode, CheckedNode]:
    """Two nodes with RDMA adapters of these speeds, and Ethernet of 10 Gbit/s."""
    one, two = ethernet(10_000)
    return replace(one, rdma_megabits=first), replace(two, rdma_megabits=second)


@pytest.mark.parametrize(
    ("machines", "backend", "least", "why"),
    [
        (ethernet(None), "gloo", 0.1, ""),
        (ethernet(1000), "gloo", 0.1, ""),
        (ethernet(10_000), "gloo", 0.125, "10% of the 10 Gbit/s of the link"),
        (ethernet(400_000), "gloo", 0.5, "the least of a TCP connection at 400 Gbit/s"),
        ((ethernet(400_000)[0], ethernet(10_000)[1]), "gloo", 0.125, "10% of the 10 Gbit/s of the link"),
        ((ethernet(400_000)[0], ethernet(None)[1]), "gloo", 0.1, ""),
        (infiniband(400_000, 400_000), "nccl", 5.0, "10% of the 400 Gbit/s of RDMA"),
        (infiniband(400_000, 200_000), "nccl", 2.5, "10% of the 200 Gbit/s of RDMA"),
        (infiniband(400_000, None), "nccl", 0.125, "10% of the 10 Gbit/s of the link"),
        (infiniband(400_000, 400_000), "gloo", 0.125, "10% of the 10 Gbit/s of the link"),
    ],
)
def test_the_default_floor_comes_from_the_speed_of_the_link(
    machines: tuple[CheckedNode, CheckedNode], backend: str, least: float, why: str
) -> None:
    """A link just above the floor is ok, one just below is slow, and the reason has the numbers."""
    above, below = least * 1.01, least * 0.99
    (fast,) = model.judge_links(machines, [sent(0, 1, above), sent(1, 0, above)], None, backend)
    assert fast.verdict == model.OK
    assert fast.floor == pytest.approx(least)
    (slow,) = model.judge_links(machines, [sent(0, 1, above), sent(1, 0, below)], None, backend)
    assert slow.verdict == model.SLOW
    reason = f", {why}" if why else ""
    assert slow.why == f"below {least:.3g} GB/s{reason}: host2 to host1 {below:.3g} GB/s"


def test_a_tenth_of_a_gigabyte_on_400_gigabits_is_slow() -> None:
    """The link is slow with both backends; an explicit floor replaces that of the speed."""
    for machines, backend in ((infiniband(400_000, 400_000), "nccl"), (ethernet(400_000), "gloo")):
        attempts = [sent(0, 1, 0.1), sent(1, 0, 0.1)]
        assert model.judge_links(machines, attempts, None, backend)[0].verdict == model.SLOW
        assert model.judge_links(machines, attempts, 0.05, backend)[0].verdict == model.OK


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ("", "eth0"),
        ("ib0", "ib0"),
        ("=ib0,eth0", "ib0"),
        ("ib", "ib0"),
        ("^docker,lo", "eth0"),
        ("eth9", None),
    ],
)
def test_the_speed_is_that_of_the_used_interface(used: str, expected: str | None) -> None:
    """The default is the interface of the Ray address."""
    found = model.used_interface(node(1, SLOW_CARD, FAST_CARD, used=used))
    assert (found and found.name) == expected


@pytest.mark.parametrize(
    ("verdict", "machines", "backend", "expected"),
    [
        (model.DEAD, (node(1, SLOW_CARD), node(2, SLOW_CARD)), "gloo", "GLOO_SOCKET_IFNAME=eth0 "),
        (model.DEAD, (node(1, SLOW_CARD, used="eth0"), node(2, SLOW_CARD, used="eth0")), "gloo", "open all"),
        (model.ONE_WAY, (node(1, SLOW_CARD), node(2, SLOW_CARD)), "gloo", "open all ports"),
        (
            model.SLOW,
            (node(1, SLOW_CARD, FAST_CARD), node(2, SLOW_CARD, FAST_CARD)),
            "nccl",
            "NCCL_SOCKET_IFNAME=ib0",
        ),
        (model.SLOW, (node(1, SLOW_CARD, FAST_CARD), node(2, SLOW_CARD)), "nccl", "iperf3"),
        (model.SLOW, infiniband(400_000, 400_000), "nccl", "`rlhf-stack doctor` on host1 and host2"),
        (model.SLOW, infiniband(400_000, 400_000), "gloo", "iperf3"),
        (model.WRONG, (node(1, SLOW_CARD), node(2, SLOW_CARD)), "gloo", "data is corrupted"),
        (model.DEAD, (CheckedNode("127.0.0.1", "a"), node(2, SLOW_CARD)), "gloo", "--node-ip-address"),
    ],
)
def test_the_remedy_names_the_variable(
    verdict: str, machines: tuple[CheckedNode, CheckedNode], backend: str, expected: str
) -> None:
    """The remedy names the variable of the backend and a common interface."""
    assert expected in model.link_remedy(*machines, verdict, backend)


def test_a_check_passes_if_links_and_group_do() -> None:
    """Data, errors and the floor count for both."""
    machines = (node(1, SLOW_CARD), node(2, SLOW_CARD))
    links = model.judge_links(machines, [sent(0, 1), sent(1, 0)], FLOOR, "gloo")
    well = NetworkReport("gloo", FLOOR, machines, links, sent(0, 1))
    assert well.is_well
    assert not replace(well, group=None).is_well
    assert not replace(well, group=failed(0, 1)).is_well
    assert not replace(well, group=sent(0, 1, FLOOR / 2)).is_well
    assert not replace(well, group=replace(sent(0, 1), wrong=(1,))).is_well
    assert not replace(
        well, links=model.judge_links(machines, [sent(0, 1), failed(1, 0)], FLOOR, "gloo")
    ).is_well


def test_a_probe_describes_the_speeds_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interfaces that are up, without loopback, and the fastest adapter that NCCL may use."""
    address = SimpleNamespace(family=socket.AF_INET, address="10.0.0.1", netmask="255.255.255.0")
    loopback = SimpleNamespace(family=socket.AF_INET, address="127.0.0.1", netmask="255.0.0.0")
    names = {"eth0": [address], "eth1": [address], "lo": [loopback]}
    states = {name: SimpleNamespace(isup=name != "eth1", speed=10_000) for name in names}
    psutil = SimpleNamespace(net_if_stats=lambda: states, net_if_addrs=lambda: names)
    monkeypatch.setitem(sys.modules, "psutil", psutil)
    monkeypatch.setattr(probe, "interface_megabits", lambda name: {"eth0": 25_000}[name])
    adapters = (
        RdmaAdapter("mlx5_0", 100_000),
        RdmaAdapter("mlx5_1", 400_000),
        RdmaAdapter("x", 9, active=False),
    )
    monkeypatch.setattr(probe, "rdma_adapters", lambda: adapters)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    for name in ("NCCL_IB_DISABLE", "NCCL_IB_HCA"):
        monkeypatch.delenv(name, raising=False)
    described = probe.Probe("10.0.0.1", "nccl", 1.0).describe()
    assert described.interfaces == (Interface("eth0", "10.0.0.1", "10.0.0.0/24", 25_000),)
    assert (described.used, described.rdma_megabits) == ("eth0", 400_000)
    monkeypatch.setenv("NCCL_IB_HCA", "=mlx5_0")
    assert probe.Probe("10.0.0.1", "nccl", 1.0).describe().rdma_megabits == 100_000
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert probe.Probe("10.0.0.1", "nccl", 1.0).describe().rdma_megabits is None


@pytest.mark.parametrize(
    ("accelerator", "backend", "gpus", "need"),
    [
        ("cuda", "nccl", 1, "needs a free GPU and a live Ray node"),
        ("cuda", "gloo", 0, "needs a live Ray node"),
        ("cpu", "nccl", 0, "needs a live Ray node"),
    ],
)
def test_a_probe_of_nccl_takes_a_gpu_and_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, backend: str, gpus: int, need: str
) -> None:
    ray = MagicMock()
    ray.exceptions.GetTimeoutError, ray.exceptions.RayError = TimeoutError, RuntimeError
    ray.get.side_effect = TimeoutError
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv(env_vars.ACCELERATOR, accelerator)
    with pytest.raises(UserError, match=need):
        cluster._Probes(machines(1, 8), backend, 1.0).describe()
    assert ray.remote.return_value.options.call_args.kwargs["num_gpus"] == gpus


@pytest.mark.parametrize("variables", [{}, {"NCCL_IB_HCA": "mlx5_0"}])
def test_a_probe_has_the_variables_of_the_run(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    """Otherwise it inherits those of the raylet."""
    ray = MagicMock()
    monkeypatch.setitem(sys.modules, "ray", ray)
    cluster._Probes(machines(1, 8), "nccl", 1.0, variables)._actor(0, 0)
    environment = ray.remote.return_value.options.call_args.kwargs.get("runtime_env")
    assert environment == ({"env_vars": variables} if variables else None)


class EndedError(RuntimeError):
    """Ray's RayActorError."""


class LateError(RuntimeError):
    """Ray's GetTimeoutError."""


class Cluster:
    """A Ray on which calls of the first process of a node fail with ``errors``, by address and method."""

    def __init__(self, errors: dict[tuple[str, str], Exception]) -> None:
        self.exceptions = SimpleNamespace(
            RayError=RuntimeError, RayActorError=EndedError, GetTimeoutError=LateError
        )
        self.errors, self.started = errors, list[str]()
        self.killed: list[str] = []

    def remote(self, _: object) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.start))

    def start(self, address: str, *_: object) -> Any:
        errors = {} if address in self.started else self.errors
        self.started.append(address)
        results = {"listen": 7, "describe": None, "transfer": probe.Outcome(0.1, 0.5, 8, True)}
        calls = {name: errors.get((address, name), result) for name, result in results.items()}
        methods = {name: MagicMock(**{"remote.return_value": call}) for name, call in calls.items()}
        return SimpleNamespace(address=address, **methods)

    def wait(self, *_: object, **__: object) -> None: ...

    def get(self, call: object, timeout: float) -> object:
        if isinstance(call, Exception):
            raise call
        return call

    def kill(self, process: Any) -> None:
        self.killed.append(process.address)


FIRST, SECOND = "10.0.0.1", "10.0.0.2"


@pytest.mark.parametrize(
    ("errors", "reason", "is_replaced"),
    [
        ({}, "", False),
        ({(FIRST, "listen"): EndedError()}, f"the process on {FIRST} ended: see the logs of that node", True),
        ({(FIRST, "listen"): LateError()}, "no response in time", True),
        ({(FIRST, "listen"): RuntimeError("cannot listen")}, "cannot listen", False),
        (
            {(SECOND, "describe"): EndedError()},
            f"the process on {SECOND} ended: see the logs of that node",
            True,
        ),
        ({(SECOND, "transfer"): LateError()}, "no response in time", True),
        ({(SECOND, "transfer"): RuntimeError("refused")}, "refused", False),
        (
            {(FIRST, "transfer"): RuntimeError("rank 1 is late"), (SECOND, "transfer"): EndedError()},
            f"the process on {SECOND} ended: see the logs of that node",
            True,
        ),
        (
            {(FIRST, "transfer"): EndedError(), (SECOND, "transfer"): RuntimeError("rank 0 is unreachable")},
            f"the process on {FIRST} ended: see the logs of that node",
            True,
        ),
    ],
)
def test_an_attempt_names_the_process_that_ended_and_the_next_one_has_another(
    monkeypatch: pytest.MonkeyPatch,
    errors: dict[tuple[str, str], Exception],
    reason: str,
    is_replaced: bool,
) -> None:
    """A process ends by NCCL's watchdog, for lack of memory, or with its node."""
    ray = Cluster(errors)
    monkeypatch.setitem(sys.modules, "ray", ray)
    probes = cluster._Probes(machines(2, 8), "nccl", 1.0)
    (attempt,) = probes.attempt([(0, (1,))], 8)
    assert attempt.error == reason
    assert sorted(ray.killed) == ([FIRST, SECOND] if is_replaced else [])
    if is_replaced or not errors:
        assert not probes.attempt([(1, (0,))], 8)[0].error


def machines(count: int, gpus: int) -> list[FreeNode]:
    """Identical empty nodes."""
    return [FreeNode(f"10.0.0.{number + 1}", gpus, 32, gpus) for number in range(count)]


def test_the_ranks_of_a_run_follow_its_plan() -> None:
    """The trainer comes first, then the workers of each engine."""
    request = Request((Group("actor", 1, 4),), Engines(2, 2))
    trainer, *workers = ranks.ranks_of_run(request)(machines(2, 4))
    assert workers == [1 - trainer] * 4


def test_a_run_without_a_placement_or_engines_is_refused() -> None:
    """The reason is that of the planner."""
    with pytest.raises(UserError, match="GPU"):
        ranks.ranks_of_run(Request((Group("actor", 2, 8),), Engines(1, 8)))(machines(2, 4))
    with pytest.raises(UserError, match="no engines"):
        ranks.ranks_of_run(Request((Group("actor", 1, 4),)))(machines(2, 4))


def test_engines_of_the_checked_group_straddle_if_those_of_the_run_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = ranks.ranks_of_run(Request((Group("actor", 1, 2),), Engines(3, 4)))
    with pytest.raises(UserError, match=env_vars.ALLOW_STRADDLE):
        place(machines(2, 7))
    monkeypatch.setenv(env_vars.ALLOW_STRADDLE, "1")
    workers = place(machines(2, 7))[1:]
    assert [len({*workers[first : first + 4]}) for first in (0, 4, 8)] == [1, 1, 2]


def test_without_a_run_every_node_has_a_worker() -> None:
    """The trainer is on the first node."""
    assert ranks.one_worker_per_node(machines(3, 8)) == [0, 0, 1, 2]


COLOCATED = ranks.ranks_of_run(Request((Group("actor", 2, 8),), Engines(8, 2, "actor")))
ALONE = ranks.ranks_of_run(Request((Group("actor", 1, 1),), Engines(1, 1, "actor")))


@pytest.mark.parametrize(
    ("accelerator", "backend", "free", "place", "expected"),
    [
        ("cuda", "nccl", machines(2, 8), COLOCATED, [0] * 8 + [1] * 8),
        ("cuda", "gloo", machines(2, 8), COLOCATED, [0] * 9 + [1] * 8),
        ("cuda", "nccl", machines(3, 1), ranks.one_worker_per_node, [0, 1, 2]),
        ("cpu", "nccl", machines(3, 1), ranks.one_worker_per_node, [0, 0, 1, 2]),
        ("cuda", "nccl", machines(1, 2), ranks.one_worker_per_node, [0, 0]),
        ("cuda", "gloo", machines(1, 1), ALONE, [0, 0]),
        ("cuda", "nccl", machines(1, 1), ALONE, None),
        ("cuda", "nccl", machines(1, 1), ranks.one_worker_per_node, None),
    ],
)
def test_a_group_over_nccl_has_a_rank_per_gpu(
    monkeypatch: pytest.MonkeyPatch,
    accelerator: str,
    backend: str,
    free: list[FreeNode],
    place: ranks.Ranks,
    expected: list[int] | None,
) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, accelerator)
    probes = MagicMock(describe=lambda: tuple(CheckedNode(one.address, one.address) for one in free))
    probes.attempt.side_effect = lambda groups, _: [sent(sender, others[0]) for sender, others in groups]
    monkeypatch.setattr(cluster, "_probes", lambda *_: nullcontext(probes))
    monkeypatch.setattr(cluster, "free_nodes", lambda: free)
    with nullcontext() if expected else pytest.raises(UserError, match=r"10\.0\.0\.1: one GPU"):
        cluster.check_network(backend, 8, FLOOR, 1.0, place, lambda _: None)
        ((sender, others),) = probes.attempt.call_args.args[0]
        assert [sender, *others] == expected


def simulated(
    count: int, broken: set[int], cut: set[tuple[int, int]], rounds: list[int]
) -> tuple[list[CheckedNode], sampling.Run]:
    """A cluster whose ``broken`` nodes and ``cut`` links fail; ``rounds`` gets the size of each attempt."""
    machines = [
        CheckedNode(f"10.0.{number // 250}.{number % 250 + 1}", f"host{number}") for number in range(count)
    ]

    def run(groups: Sequence[tuple[int, tuple[int, ...]]]) -> list[Attempt]:
        rounds.append(len(groups))
        busy = [member for sender, receivers in groups for member in (sender, *set(receivers))]
        assert len(busy) == len(set(busy)), "a node is in two groups at once"
        return [
            failed(sender, receivers[0])
            if {sender, *receivers} & broken or (min(sender, receivers[0]), max(sender, receivers[0])) in cut
            else sent(sender, receivers[0])
            for sender, receivers in groups
        ]

    return machines, run


def test_a_thousand_nodes_are_checked_in_a_few_rounds() -> None:
    """All pairs are 499500 links in 999 rounds of two transfers each."""
    rounds: list[int] = []
    machines, run = simulated(1000, set(), set(), rounds)
    links, attempts = sampling.check_links(machines, run, FLOOR, "gloo", lambda _: None)
    assert {node for link in links for node in (link.first, link.second)} == set(range(1000))
    assert {link.verdict for link in links} == {model.OK}
    assert (len(rounds), len(attempts)) == (4, 2000)


@pytest.mark.parametrize("count", [17, 18, 1000, 1001])
def test_a_broken_node_is_told_from_a_cut_link(count: int) -> None:
    rounds: list[int] = []
    machines, run = simulated(count, {5}, {(10, 11)}, rounds)
    links, _ = sampling.check_links(machines, run, FLOOR, "gloo", lambda _: None)
    bad = [(link.first, link.second) for link in links if link.verdict != model.OK]
    assert sum(5 in pair for pair in bad) == 3  # both links of the ring, and the second opinion
    assert [pair for pair in bad if 5 not in pair] == [(10, 11)]
    assert len(rounds) <= 10
    assert all(sum(node in pair for pair in bad) == 1 for node in (4, 6, 10, 11))


def test_a_group_that_fails_as_a_whole_is_halved_to_the_receiver() -> None:
    rounds: list[int] = []
    _, run = simulated(1000, {777}, set(), rounds)
    assert sampling.narrowed(Attempt(0, tuple(range(1, 1000)), error="x"), run) == (777,)
    assert len(rounds) <= 20


def test_a_group_that_fails_only_together_is_not_narrowed() -> None:
    everyone = tuple(range(1, 9))
    run = lambda groups: [sent(0, 1) for _ in groups]  # noqa: E731
    assert sampling.narrowed(Attempt(0, everyone, error="x"), run) == everyone


def test_few_nodes_are_tested_in_every_pair() -> None:
    machines, run = simulated(6, set(), set(), [])
    assert len(sampling.check_links(machines, run, FLOOR, "gloo", lambda _: None)[0]) == 15


@pytest.mark.parametrize(
    ("family", "address", "netmask", "network"),
    [
        (socket.AF_INET, "10.0.3.4", "255.255.255.0", "10.0.3.0/24"),
        (socket.AF_INET6, "fd00:1::5", "ffff:ffff:ffff:ffff::", "fd00:1::/64"),
        (socket.AF_INET6, "fe80::1%eth0", "ffff:ffff:ffff:ffff::", ""),
        (socket.AF_INET6, "::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", ""),
        (socket.AF_INET, "127.0.0.1", "255.0.0.0", ""),
        (socket.AF_PACKET, "aa:bb:cc:dd:ee:ff", None, ""),
    ],
)
def test_the_network_of_an_address(family: int, address: str, netmask: str | None, network: str) -> None:
    assert probe.interface_network(family, address, netmask) == network


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_probe_listens_at_an_address_of_either_family(address: str) -> None:
    if address == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    listening = probe.Probe(address, "gloo", 1.0)
    with socket.create_connection((address, listening.listen()), timeout=5):
        assert listening._listener
    listening._listener.close()


def test_a_probe_of_nccl_joins_whatever_the_run_demands_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `auto` such a run uses gloo."""
    monkeypatch.setenv(env_vars.SYNC_SPARSE, "on")
    monkeypatch.setenv(env_vars.SYNC_SOURCES, "2")
    probe.Probe("10.0.0.1", "nccl", 1.0)
    refuse_gloo_only("this group is NCCL's")


@pytest.mark.parametrize("accelerator", ["cuda", "rocm"])
def test_a_probe_of_gloo_uses_no_gpu(accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hides the GPUs from a process that requests none, or shows all of them if a variable says so."""
    monkeypatch.setenv(env_vars.ACCELERATOR, accelerator)
    monkeypatch.setitem(sys.modules, "ray", MagicMock(get_gpu_ids=list))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(device=str))  # and no torch.cuda
    create = MagicMock()
    monkeypatch.setattr("rlhf_stack.sync.create_group", create)
    monkeypatch.setattr(probe, "_measure", lambda *_: (1.0, 8, True))
    probe.Probe("10.0.0.1", "gloo", 1.0).transfer("10.0.0.1", 1, 0, 2, 8)
    assert create.call_args.args[4] == "cpu"
    assert not devices.is_gpu()  # by which buffers are pinned
    devices.synchronize()


@pytest.mark.parametrize("failing", [False, True])
def test_each_attempt_closes_its_group(failing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A communicator of NCCL that stays open holds GPU memory and a thread."""
    group = MagicMock()
    monkeypatch.setattr("rlhf_stack.sync.create_group", lambda *_: group)
    monkeypatch.setattr("rlhf_stack.accelerator.devices.current_device", lambda: "cpu")
    measured = MagicMock(side_effect=SyncError("rank 1 does not answer") if failing else [(1.0, 8, True)])
    monkeypatch.setattr(probe, "_measure", measured)
    with pytest.raises(SyncError) if failing else nullcontext():
        assert probe.Probe("10.0.0.1", "nccl", 1.0).transfer("10.0.0.1", 1, 0, 2, 8).equal
    measured.assert_called_once_with(group, 8)
    group.close.assert_called_once_with()
