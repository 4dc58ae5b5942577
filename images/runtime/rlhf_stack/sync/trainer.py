"""What a weight sync uses of OpenRLHF's ``ActorPPOTrainer`` and its arguments, in every release."""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlhf_stack.sync.backend import requested_backend
from rlhf_stack.sync.buckets import Share

ZERO_3 = 3
TAG = re.compile(r"(?:best_)?global_step([0-9]{1,9})(?:_universal)?")
FULL_SHAPE = "rlhf_stack_full_shape"  # an attribute of a parameter that DeepSpeed's tensor parallelism shards


def section(arguments: Any, name: str) -> Any:
    """Return a section of OpenRLHF's arguments; older releases have one flat namespace, which is returned."""
    return getattr(arguments, name, arguments)


def shares_gpus(arguments: Any) -> bool:
    """Report whether each trainer rank passes the weights to the engine worker on its own GPU."""
    train = section(arguments, "train")
    is_shared = getattr(train, "colocate_all", False) and not getattr(train, "async_enable", False)
    return is_shared and hasattr(arguments, "vllm") and requested_backend(arguments) == "nccl"


def requests_ray_collectives(arguments: Any) -> bool:
    """Report whether --vllm.sync_with_ray is among OpenRLHF's arguments."""
    return bool(getattr(section(arguments, "vllm"), "sync_with_ray", False))


def uses_ray_collectives(arguments: Any) -> bool:
    """Report whether upstream sends the weights one by one with Ray's collectives: not on shared GPUs."""
    return requests_ray_collectives(arguments) and not shares_gpus(arguments)


def synced_names(trainer: Any) -> list[tuple[str, Any]]:
    """Return names and parameters that engines receive: of a vision-language model the trained ones alone.

    Adapters are trained in place of the frozen weight of PEFT's ``base_layer``, into which they are merged.
    """
    is_vlm = getattr(trainer.actor, "is_vlm", False)
    named = trainer.actor.model.module.named_parameters()
    return [
        (name, each) for name, each in named if each.requires_grad or not is_vlm or ".base_layer." in name
    ]


def own_group(trainer: Any) -> Any:
    """Return the sync group of this trainer rank, None if it has none."""
    return getattr(trainer, "_model_update_group", None)


def own_share(trainer: Any) -> Share:
    """Return what this trainer rank sends, if it has a sync group."""
    share: Share = getattr(trainer, "_weight_share", Share())
    return share


def engine_indices(trainer: Any) -> Sequence[int]:
    """Return the index of each engine in the trainer's list: its first position, if others are lost too."""
    indices: Sequence[int] = getattr(trainer, "engine_indices", range(len(trainer.vllm_engines)))
    return indices


def weight_version(trainer: Any) -> int:
    """Return the version of the weights that rank 0 has last sent, 0 if it has sent none."""
    return int(getattr(trainer, "weight_version", 0))


def next_weight_version(trainer: Any) -> int:
    """Return the version of the weights that rank 0 sends next.

    The first sync of a run that continues sends the weights of its checkpoint, which have the version that
    the sync after that step had, as far as each step had one sync.
    """
    if not hasattr(trainer, "weight_version"):
        return max(1, resumed_step(trainer.strategy.args))
    return weight_version(trainer) + 1


def resumed_step(arguments: Any) -> int:
    """Return the step whose checkpoint the run has loaded, 0 if none; it is known until the next is saved.

    OpenRLHF names the actor's checkpoints after steps; DeepSpeed's ``latest`` names the loaded one.
    """
    own = section(arguments, "ckpt")
    folder = getattr(own, "path", None) or getattr(own, "ckpt_path", None)
    if not folder or not (getattr(own, "load_enable", False) or getattr(own, "load_checkpoint", False)):
        return 0
    is_universal = getattr(section(arguments, "ds"), "use_universal_ckpt", False)
    latest = Path(folder) / "_actor" / ("latest_universal" if is_universal else "latest")
    try:
        tag = latest.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):  # there was no checkpoint to load
        return 0
    found = TAG.fullmatch(tag)
    return int(found[1]) if found else 0


def is_sharded(trainer: Any) -> bool:
    """Report whether a trainer rank holds only a part of some parameters."""
    arguments = section(trainer.strategy.args, "ds")
    return arguments.zero_stage == ZERO_3 or getattr(arguments, "tensor_parallel_size", 1) > 1


@contextmanager
def gathered(trainer: Any, parameters: Sequence[Any]) -> Iterator[None]:
    """Gather ``parameters`` that ZeRO-3 or DeepSpeed's tensor parallelism shards, together on every rank."""
    import deepspeed

    arguments = section(trainer.strategy.args, "ds")
    with ExitStack() as stack:
        if getattr(arguments, "tensor_parallel_size", 1) > 1:
            layers = deepspeed.module_inject.layers
            for each in parameters:  # a list must be the parameters of one layer
                stack.enter_context(layers.GatherReplacedLayerParams([each], trainer.actor.model.module))
        else:
            is_sharded = arguments.zero_stage == ZERO_3
            stack.enter_context(deepspeed.zero.GatheredParameters(list(parameters), enabled=is_sharded))
        yield


def full_shape(trainer: Any, parameter: Any) -> Any:
    """Return the shape of a parameter when it is `gathered`; every rank must take part in the first call."""
    if hasattr(parameter, "ds_shape"):
        return parameter.ds_shape
    if getattr(section(trainer.strategy.args, "ds"), "tensor_parallel_size", 1) == 1:
        return parameter.shape
    if not hasattr(parameter, FULL_SHAPE):
        with gathered(trainer, [parameter]):
            setattr(parameter, FULL_SHAPE, parameter.shape)
    return getattr(parameter, FULL_SHAPE)
