"""Demand for nodes that the cluster lacks: a pending placement group, which Ray's autoscaler reads."""

from types import TracebackType
from typing import Any

from rlhf_stack.config import env_vars
from rlhf_stack.lazy import ray
from rlhf_stack.placement.model import Request
from rlhf_stack.telemetry import run_log


class Demand:
    """A context in which `request_nodes` may keep a pending group; it is removed at the end."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._group: Any = None

    def __enter__(self) -> "Demand":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.withdraw()

    def request_nodes(self) -> None:
        """Ask the autoscaler for the resources of the request, once."""
        if self._group is None:
            run_log.info(
                f"placement: the cluster has no room for {self._request.size} GPUs; its autoscaler is asked "
                f"({env_vars.AUTOSCALE}=1, up to {env_vars.placement_timeout():.0f} s)"
            )
            self._group = ray.util.placement_group(bundles(self._request), strategy="PACK")

    def withdraw(self) -> None:
        """Remove the group, which occupies the new nodes if it was placed."""
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None


def bundles(request: Request) -> list[dict[str, float]]:
    """Return the demand: a bundle for each rank, and one for each engine, so that a node has room for it."""
    engines = request.engines
    own = [float(engines.size)] * engines.count if engines and not engines.shares else []
    ranks = [1.0] * sum(group.size for group in request.groups)
    return [{"GPU": gpus, "CPU": gpus} for gpus in (*own, *ranks)]
