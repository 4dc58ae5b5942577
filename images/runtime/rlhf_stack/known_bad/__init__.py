"""The database of known-bad versions and settings, in ``rows/*.toml``, matched with versions or a log.

May import ``cleanup``, ``accelerator``, ``memory``, ``telemetry``, ``config`` and ``errors``.
"""

from rlhf_stack.known_bad.matching import Environment, accelerator_of, explain, freeze, judge
from rlhf_stack.known_bad.model import MalformedRow, Row, load

__all__ = ["Environment", "MalformedRow", "Row", "accelerator_of", "explain", "freeze", "judge", "load"]
