"""Combinations of versions and settings that are known not to work, and what a log says when one is met.

The rows are data, in ``rows/*.toml``; `judge` asks them of versions and an environment, `explain` of a log.
"""

from rlhf_stack.known_bad.matching import Environment, accelerator_of, explain, freeze, judge
from rlhf_stack.known_bad.model import MalformedRow, Row, load

__all__ = ["Environment", "MalformedRow", "Row", "accelerator_of", "explain", "freeze", "judge", "load"]
