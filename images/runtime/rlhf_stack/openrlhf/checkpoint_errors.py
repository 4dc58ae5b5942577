"""Checkpoint errors with rank, node and folder, none of which torch's error has.

A full disk is "unexpected pos 128 vs 0" to torch.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_stack.cluster import actor_registry

GB = 1e9


class CheckpointError(RuntimeError):
    """A checkpoint is incomplete; the message has rank, node, folder, free space and reason."""


def name_checkpoint_errors(save: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``save(strategy, model, folder, ...)``: its errors become `CheckpointError`."""

    @functools.wraps(save)
    def saved(strategy: Any, model: Any, folder: str, *arguments: Any, **options: Any) -> Any:
        try:
            return save(strategy, model, folder, *arguments, **options)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(_text(Path(folder), str(error).strip())) from error

    return saved


def _text(folder: Path, reason: str) -> str:
    """Return the message, rank first, because ``reason`` may have more than one line."""
    from torch import distributed as dist

    who = actor_registry.describe(actor_registry.own_record(f"rank {dist.get_rank()}"), [])
    return f"{who}: the checkpoint in {folder} is incomplete{_free_space(folder)}: {reason}"


def _free_space(folder: Path) -> str:
    """Describe the free space in GB; empty if ``folder`` does not exist."""
    if not folder.is_dir():
        return ""
    usage = shutil.disk_usage(folder)
    return f", {usage.free / GB:.1f} of {usage.total / GB:.1f} GB are free there"
