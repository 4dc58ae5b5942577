"""Where trainer ranks and engines go: planned before anything starts, so that no engine straddles nodes."""

from rlhf_stack.placement.model import Engines, FreeNode, Group, PlacementError, Plan, Request
from rlhf_stack.placement.planner import plan
from rlhf_stack.placement.reservation import (
    driver_cpus,
    engine_bundles,
    rank_bundles,
    reserve,
    reserve_engines,
    wait,
)

__all__ = [
    "Engines",
    "FreeNode",
    "Group",
    "PlacementError",
    "Plan",
    "Request",
    "driver_cpus",
    "engine_bundles",
    "plan",
    "rank_bundles",
    "reserve",
    "reserve_engines",
    "wait",
]
