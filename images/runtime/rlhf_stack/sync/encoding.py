"""The encoding of each sync: all weights, or the elements that changed since the sync before."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_stack.config import env_vars
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.telemetry import run_log

FULL = "full"  # all weights, and no node keeps them
KEPT = "kept"  # all weights, which every node keeps
CHANGED = "changed"  # the elements that differ from what every node keeps

GIGA = 1e9
SLOW_SECONDS = 1.0  # a shorter sync is not worth the memory
SLOW_RATE = 1.0  # GB/s: over a faster link, finding the changed elements takes as long as sending all
ROOM = 2  # `auto` keeps the weights if the memory that is left on every node is so many times their size


def refuse_gloo_only(why: str) -> None:
    """Raise `SyncError` with the reason ``why`` if the user demands what only a sync over gloo can do."""
    demands = {
        env_vars.SYNC_SPARSE: (env_vars.sync_sparse() == "on", "changed elements are sent"),
        env_vars.SYNC_SOURCES: ((env_vars.sync_sources() or 1) > 1, "several trainer ranks send"),
    }
    for name, (is_demanded, what) in demands.items():
        if is_demanded:
            raise SyncError(
                f"{name}={os.environ[name]}: {what} over gloo alone, and {why}; use --vllm.sync_backend gloo "
                f"on GPUs of their own, or {name}=auto"
            )


@dataclass
class Encodings:
    """Selects how the next sync of a group is encoded, by the setting and by what previous ones took.

    ``nodes`` is the number of nodes that rank 0 sends to. Every group begins with all weights, and so does
    the sync after a failed one.
    """

    nodes: int
    setting: str = field(default_factory=env_vars.sync_sparse)
    every: int = field(default_factory=env_vars.sync_full_every)
    encoding: str = FULL  # of the last sync
    sent: int = 0  # its bytes on a link between two nodes
    _kept: Sequence[Any] | None = None  # the content of the sync that every node keeps
    _since: int = 0  # syncs since all weights were sent
    _full: list[float] = field(default_factory=list)
    _changed: list[float] = field(default_factory=list)

    def select(self, content: Sequence[Any], size: int, left: int) -> str:
        """Return the encoding of a sync of ``content``, ``size`` bytes; until `ended` it counts as failed.

        ``left`` are the bytes of host memory that are left on the node that has least.
        """
        kept, self._kept = self._kept, None
        before = self.encoding
        if self.setting == "off" or (self.setting == "auto" and (why := self._why_full(size, left))):
            self.encoding = FULL
            if before != FULL:
                run_log.info(f"weight sync: all weights are sent again: {why}")
            return FULL
        if before == FULL:
            run_log.info(
                "weight sync: changed elements are sent from now on; each node of engines keeps the weights, "
                f"{size / GIGA:.2f} GB of its host's memory, and each node that sends keeps what it sends"
            )
        self.encoding = CHANGED if kept == content and self._since < self.every else KEPT
        return self.encoding

    def ended(self, content: Sequence[Any], seconds: float, sent: int) -> None:
        """Record that the sync that was selected has succeeded."""
        self.sent = sent
        if self.encoding == CHANGED:
            self._changed.append(seconds)
            self._since += 1
        else:
            self._full.append(seconds)
            self._since = 1
        self._kept = None if self.encoding == FULL else content

    def _why_full(self, size: int, left: int) -> str:
        """Return why `auto` sends all weights, "" if it does not."""
        if not self.nodes:
            return "all ranks are on one node"
        if not self._full:
            return "no sync has been measured"
        if (seconds := min(self._full)) < SLOW_SECONDS or size / seconds > SLOW_RATE * GIGA:
            return f"that takes {seconds:.2f} s"
        if self._changed and min(self._changed) > seconds:
            return f"that takes {seconds:.2f} s, and changed elements {min(self._changed):.2f} s"
        if self.encoding == FULL and left < ROOM * size:
            return f"a node has {left / GIGA:.2f} GB of memory left"
        return ""
