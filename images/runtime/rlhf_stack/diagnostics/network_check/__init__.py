"""A sync before there is anything to train: which nodes cannot talk, and how fast others do."""

from rlhf_stack.diagnostics.network_check.cluster import rehearse
from rlhf_stack.diagnostics.network_check.model import Attempt, Interface, Link, Node, Report

__all__ = ["Attempt", "Interface", "Link", "Node", "Report", "rehearse"]
