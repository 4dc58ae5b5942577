"""Plans a run before it starts: its placement, its memory, and the settings to change.

May import every package except ``cli``, ``hooks``, ``demo`` and ``diagnostics``.
"""

from rlhf_stack.planning.advice import Advice, advise
from rlhf_stack.planning.assessment import Assessment, PlannedGpu, PlannedNode, assess
from rlhf_stack.planning.cluster_spec import Machine, ray_machines, read_machines, uniform_machines

__all__ = [
    "Advice",
    "Assessment",
    "Machine",
    "PlannedGpu",
    "PlannedNode",
    "advise",
    "assess",
    "ray_machines",
    "read_machines",
    "uniform_machines",
]
