"""A sync before there is anything to train: which nodes cannot talk, and how fast others do."""

from rlhf_stack.rehearse.cluster import rehearse
from rlhf_stack.rehearse.model import Attempt, Interface, Link, Node, Report

__all__ = ["Attempt", "Interface", "Link", "Node", "Report", "rehearse"]
