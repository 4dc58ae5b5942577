"""Where trainer ranks and engines go: planned before anything starts, so that no engine straddles nodes."""

from rlhf_stack.placement.model import Engines, FreeNode, Group, PlacementError, Plan, Request
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
    "plan",
    "upstream_layout",
]
