"""Placement of trainer ranks and engines: planned before anything starts, then reserved in Ray.

May import ``cluster``, ``compat``, ``accelerator``, ``telemetry``, ``config``, ``inputs`` and ``errors``.
"""

from rlhf_stack.placement.model import Engines, FreeNode, Group, PlacementError, Plan, Request
from rlhf_stack.placement.planner import plan
from rlhf_stack.placement.reservation import (
    driver_cpus,
    engine_place,
    rank_bundles,
    reserve,
    reserve_engines,
    wait_for_placement_group,
)
