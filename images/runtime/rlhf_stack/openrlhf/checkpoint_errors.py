"""Which rank could not write a checkpoint, where it was and where to: the error of torch has none of these.

A disk that is full is "unexpected pos 128 vs 0" to torch.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_stack.cluster import actor_registry

GB = 1e9


class CheckpointError(RuntimeError):
    """A checkpoint that is not whole; the text has rank, node, folder, room there, and why."""


def name_checkpoint_errors(save: Callable[..., Any]) -> Callable[..., Any]:
    """``save(strategy, model, folder, ...)`` with errors of writing, and of peers that wait for it, named."""

    @functools.wraps(save)
    def saved(strategy: Any, model: Any, folder: str, *arguments: Any, **options: Any) -> Any:
        try:
            return save(strategy, model, folder, *arguments, **options)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(_text(Path(folder), str(error).strip())) from error

    return saved


def _text(folder: Path, reason: str) -> str:
    """Who it was first; ``reason`` may have more than one line."""
    from torch import distributed as dist

    who = actor_registry.describe(actor_registry.own_record(f"rank {dist.get_rank()}"), [])
    return f"{who}: the checkpoint in {folder} is not whole{_room(folder)}: {reason}"


def _room(folder: Path) -> str:
    """What is free there in GB, or nothing where there is no such folder."""
    if not folder.is_dir():
        return ""
    usage = shutil.disk_usage(folder)
    return f", {usage.free / GB:.1f} of {usage.total / GB:.1f} GB are free there"
