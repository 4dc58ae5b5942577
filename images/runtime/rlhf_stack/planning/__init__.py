"""A run on a cluster before it starts: where everything lands, what it needs, and what to change."""

from rlhf_stack.planning.advice import Advice, advise
from rlhf_stack.planning.cluster_spec import Machine, alike, read, running
from rlhf_stack.planning.report import Gpu, Node, Report, report

__all__ = [
    "Advice",
    "Gpu",
    "Machine",
    "Node",
    "Report",
    "advise",
    "alike",
    "read",
    "report",
    "running",
]
