"""A run on a cluster before it starts: where everything lands, what it needs, and what to change."""

from rlhf_stack.planning.advice import Advice, advise
from rlhf_stack.planning.assessment import Assessment, PlannedGpu, PlannedNode, assess
from rlhf_stack.planning.cluster_spec import Machine, read, running, uniform_machines

__all__ = [
    "Advice",
    "Assessment",
    "Machine",
    "PlannedGpu",
    "PlannedNode",
    "advise",
    "assess",
    "read",
    "running",
    "uniform_machines",
]
