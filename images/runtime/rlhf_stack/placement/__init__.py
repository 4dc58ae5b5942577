"""Where trainer ranks and engines go: planned before anything starts, so that no engine straddles nodes."""

from rlhf_stack.placement.cluster import (
    driver_cpus,
    engine_bundles,
    rank_bundles,
    reserve,
    reserve_engines,
    wait,
)
from rlhf_stack.placement.model import Engines, FreeNode, Group, PlacementError, Plan, Request
from rlhf_stack.placement.openrlhf import reserve_run
from rlhf_stack.placement.planning import plan
from rlhf_stack.placement.upstream import UpstreamLayout, upstream_layout

__all__ = [
    "Engines",
    "FreeNode",
    "Group",
    "PlacementError",
    "Plan",
    "Request",
    "UpstreamLayout",
    "driver_cpus",
    "engine_bundles",
    "plan",
    "rank_bundles",
    "reserve",
    "reserve_engines",
    "reserve_run",
    "upstream_layout",
    "wait",
]
