"""Runs the network check on a Ray cluster: a probe per node, links of nodes, then the whole group."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.diagnostics.network_check.model import DEFAULT_FLOOR, Attempt, CheckedNode, NetworkReport
from rlhf_stack.diagnostics.network_check.probe import Outcome, Probe
from rlhf_stack.diagnostics.network_check.ranks import Ranks, one_worker_per_node, with_own_gpus
from rlhf_stack.diagnostics.network_check.sampling import ALL_PAIRS, check_links, narrowed
from rlhf_stack.errors import UserError
from rlhf_stack.lazy import ray
from rlhf_stack.placement import FreeNode
from rlhf_stack.placement.reservation import PIN, SLIVER, free_nodes

START_SECONDS = 120.0  # for a process to import torch on a busy node
MOST_NAMES = 8  # of nodes in an error
GRACE_SECONDS = 10.0  # beyond the deadline of the group, whose own error is more specific


def check_network(
    backend: str,
    size: int,
    floor: float | None,
    deadline: float,
    ranks: Ranks = one_worker_per_node,
    progress: Callable[[str], None] = print,
    variables: Mapping[str, str] | None = None,
) -> NetworkReport:
    """Test links of GPU nodes (of all if none has a GPU; see `sampling`), then the group of ``ranks``.

    ``size`` in bytes, ``floor`` in 10^9 bytes/s, None to derive it as `judge_links` does, ``deadline`` in
    seconds per step. ``ranks`` returns the node of each rank, ``variables`` are those of the run, for all
    actors. This process must be connected to the cluster; all actors are removed afterwards.
    `UserError` names a node on which no process starts, and one whose only GPU leaves no group over NCCL.
    """
    free = free_nodes()
    free = [node for node in free if node.total_gpus] or free
    with _probes(free, backend, deadline, variables) as probes:
        nodes = probes.describe()
        found, attempts = check_links(
            nodes, lambda groups: probes.attempt(groups, size), floor, backend, progress
        )
        group = None
        if not any(attempt.error for attempt in attempts):
            first, *others = with_own_gpus(free, ranks(free)) if takes_gpus(backend) else ranks(free)
            if not others:
                raise UserError(
                    f"{free[first].address}: one GPU, so there is no group over {backend}, of which each "
                    "rank takes a GPU; with --backend gloo none does"
                )
            progress(f"the group of {len(others) + 1} ranks")
            group = probes.attempt([(first, tuple(others))], size)[0]
            if group.error and len(nodes) > ALL_PAIRS:
                progress("the group failed: testing halves of it")
                few = narrowed(group, lambda groups: probes.attempt(groups, size))
                hosts = ", ".join(dict.fromkeys(nodes[node].host for node in few[:MOST_NAMES]))
                group = replace(
                    group, error=f"{group.error}; it fails with {len(few)} receivers too: {hosts}"
                )
    return NetworkReport(backend, DEFAULT_FLOOR if floor is None else floor, nodes, found, group)


class _Probes:
    """The probe actors of each node, created when an attempt needs them."""

    def __init__(
        self,
        free: Sequence[FreeNode],
        backend: str,
        deadline: float,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._free, self._backend, self._deadline = free, backend, deadline
        self._environment = {"runtime_env": {"env_vars": dict(variables)}} if variables else {}
        self._actors: list[list[Any]] = [[] for _ in free]

    def describe(self) -> tuple[CheckedNode, ...]:
        """Describe each node, after starting a probe on it."""
        answers = [self._actor(node, 0).describe.remote() for node in range(len(self._free))]
        ray.wait(answers, num_returns=len(answers), timeout=START_SECONDS)
        return tuple(self._answer(node, answer) for node, answer in enumerate(answers))

    def attempt(self, groups: Sequence[tuple[int, tuple[int, ...]]], size: int) -> list[Attempt]:
        """Run an attempt for each group at the same time; groups must not share a node."""
        started = [self._begin(sender, receivers, size) for sender, receivers in groups]
        end = time.monotonic() + 2 * self._deadline + GRACE_SECONDS
        return [
            begun if isinstance(begun, Attempt) else self._end(sender, receivers, begun, end)
            for (sender, receivers), begun in zip(groups, started, strict=True)
        ]

    def close(self) -> None:
        """End every actor."""
        for actors in self._actors:
            for actor in actors:
                ray.kill(actor)

    def _answer(self, node: int, answer: Any) -> CheckedNode:
        try:
            found: CheckedNode = ray.get(answer, timeout=0)
        except ray.exceptions.GetTimeoutError:
            need = "a free GPU and " if takes_gpus(self._backend) else ""
            raise UserError(
                f"{self._free[node].address}: no process started in {START_SECONDS:g} s; it needs {need}"
                "a live Ray node: see `ray status` and the node's logs"
            ) from None
        except ray.exceptions.RayError as error:
            raise UserError(f"{self._free[node].address}: its process failed: {cause(error)}") from None
        return found

    def _actor(self, node: int, number: int) -> Any:
        while len(self._actors[node]) <= number:
            address = self._free[node].address
            options = {
                "num_cpus": 0,
                "num_gpus": 1 if takes_gpus(self._backend) else 0,
                "resources": {PIN + address: SLIVER},
                **self._environment,
            }
            actor = ray.remote(Probe).options(**options).remote(address, self._backend, self._deadline)
            self._actors[node].append(actor)
        return self._actors[node][number]

    def _begin(self, sender: int, receivers: tuple[int, ...], size: int) -> list[Any] | Attempt:
        """Start a group when all of its processes have started; a failed attempt if one does not."""
        taken: dict[int, int] = {}
        members = []
        for node in (sender, *receivers):
            members.append(self._actor(node, taken.setdefault(node, 0)))
            taken[node] += 1
        ready = [members[0].listen.remote(), *(member.describe.remote() for member in members[1:])]
        found, error = self._results((sender, *receivers), ready, START_SECONDS)
        if error:
            return Attempt(sender, receivers, error=error)
        host, port, world = self._free[sender].address, found[0], len(members)
        return [member.transfer.remote(host, port, rank, world, size) for rank, member in enumerate(members)]

    def _end(self, sender: int, receivers: tuple[int, ...], answers: list[Any], end: float) -> Attempt:
        """Collect the results of one group."""
        outcomes: list[Outcome]
        outcomes, error = self._results((sender, *receivers), answers, max(0.0, end - time.monotonic()))
        if error:
            return Attempt(sender, receivers, error=error)
        root, *others = outcomes
        return Attempt(
            sender,
            receivers,
            root.bytes,
            max(outcome.connect_seconds for outcome in outcomes),
            tuple(outcome.seconds for outcome in others),
            tuple(node for node, outcome in zip(receivers, others, strict=True) if not outcome.equal),
        )

    def _results(self, nodes: Sequence[int], answers: list[Any], limit: float) -> tuple[list[Any], str]:
        """The results of a process on each of ``nodes`` within ``limit`` seconds; why one failed, or "".

        The processes of all these nodes are replaced if one has ended or is late.
        """
        ray.wait(answers, num_returns=len(answers), timeout=limit)
        results, late, errors, ended = [], [], [], []
        for node, answer in zip(nodes, answers, strict=True):
            try:
                results.append(ray.get(answer, timeout=0))
            except ray.exceptions.GetTimeoutError:
                late.append("no response in time")
            except ray.exceptions.RayActorError:
                ended.append(f"the process on {self._free[node].address} ended: see the logs of that node")
            except ray.exceptions.RayError as error:
                errors.append(cause(error))
        if late or ended:
            self._replace(nodes)
        reasons = [*late, *errors, *ended]  # others fail because one ended; a receiver's names host and port
        return results, reasons[-1] if reasons else ""

    def _replace(self, nodes: Sequence[int]) -> None:
        for node in set(nodes):
            for actor in self._actors[node]:
                ray.kill(actor)
            self._actors[node] = []


@contextmanager
def _probes(
    free: Sequence[FreeNode], backend: str, deadline: float, variables: Mapping[str, str] | None
) -> Iterator[_Probes]:
    probes = _Probes(free, backend, deadline, variables)
    try:
        yield probes
    finally:
        probes.close()


def takes_gpus(backend: str) -> bool:
    """Whether each rank of a group over ``backend`` takes a GPU."""
    return devices.is_gpu() and backend == "nccl"


def cause(error: BaseException) -> str:
    """The message of an exception in a remote process, without its traceback."""
    inner = getattr(error, "cause", None)
    return str(inner or error).strip().splitlines()[0]
