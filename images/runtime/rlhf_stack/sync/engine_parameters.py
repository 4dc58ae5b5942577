"""The trainer's parameters as engines know them: in the checkpoint's layout, LoRA adapters of PEFT merged."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_stack.lazy import torch
from rlhf_stack.sync.buckets import ParameterSpec
from rlhf_stack.sync.checkpoint_layout import Region, checkpoint_layout
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.trainer import full_shape

WRAPPER, ADAPTER = "base_model.model.", ".lora_"  # in PEFT's names
BASE_LAYERS = re.compile(r"(\.base_layer)+\.")  # one for each parameter of a layer's experts


@dataclass(frozen=True)
class EngineParameter:
    """A ``parameter`` under the engine's ``name``; ``layer`` is PEFT's, if adapters belong to it.

    With ``region`` it is only a part of the parameter ``fused``, such as one of several experts.
    """

    name: str
    parameter: Any
    layer: Any = None
    region: Region | None = None
    fused: str = ""

    @property
    def sources(self) -> list[Any]:
        """The parameters that `value` reads, which ZeRO-3 must have gathered."""
        own = [] if self.layer is None else self.layer.named_parameters()
        return [self.parameter, *(each for name, each in own if f".{name}".startswith(ADAPTER))]

    def spec(self, trainer: Any) -> ParameterSpec:
        """Describe it for an engine; every trainer rank must take part, see `full_shape`."""
        shape = full_shape(trainer, self.parameter) if self.region is None else self.region.size
        return replace(parameter_spec(self.name, self.parameter, shape), fused=self.fused)

    def value(self) -> "torch.Tensor":
        """Return what the engine must hold."""
        return self._part(self._merged())

    def _merged(self) -> "torch.Tensor":
        """The whole parameter with the adapters, as PEFT's own merge computes it: a copy if it has any."""
        weight: torch.Tensor = self.parameter.data
        with torch.no_grad():
            for adapter in () if self.layer is None else self.layer.active_adapters:
                weight = weight + self.layer.get_delta_weight(adapter).to(weight.dtype)
        return weight

    def _part(self, weight: "torch.Tensor") -> "torch.Tensor":
        return weight if self.region is None else self.region.of(weight)


def values(parameters: Mapping[int, EngineParameter]) -> "dict[int, torch.Tensor]":
    """Return the value of each of ``parameters``; what all parts of a fused one share is merged once."""
    merged: dict[int, torch.Tensor] = {}
    found = {}
    for index, one in parameters.items():
        source = id(one.parameter)
        if source not in merged:
            merged[source] = one._merged()
        found[index] = one._part(merged[source])
    return found


def parameter_spec(name: str, parameter: Any, shape: Any = None) -> ParameterSpec:
    """Describe a parameter for an engine; ``shape`` is that of the whole one, if this is a shard."""
    shape = parameter.shape if shape is None else shape
    dtype = str(parameter.dtype).removeprefix("torch.")
    return ParameterSpec(name, dtype, tuple(shape), shape.numel() * parameter.element_size())


def engine_parameters(trainer: Any, parameters: Sequence[tuple[str, Any]]) -> list[EngineParameter]:
    """Return ``parameters`` (name, parameter) of OpenRLHF's ``ActorPPOTrainer`` as its engines know them.

    `SyncError` if the weight of a layer with adapters is not among them.
    """
    layers = {
        id(layer.get_param() if hasattr(layer, "get_param") else layer.base_layer.weight): layer
        for layer in trainer.actor.model.module.modules()
        if hasattr(layer, "get_delta_weight") and hasattr(layer, "base_layer")
    }
    missing = len(layers.keys() - {id(parameter) for _, parameter in parameters})
    if missing:
        raise SyncError(
            f"{missing} weights of layers with LoRA adapters are not sent, so that the adapters cannot be "
            "merged into them: train without LoRA"
        )
    named = {
        BASE_LAYERS.sub(".", name.removeprefix(WRAPPER)) if layers else name: parameter
        for name, parameter in parameters
        if not layers or ADAPTER not in name
    }
    whole = {name: EngineParameter(name, each, layers.get(id(each))) for name, each in named.items()}
    shapes = {name: (full_shape(trainer, each), each.dtype) for name, each in named.items()}
    layout = checkpoint_layout(trainer.actor.model.module, shapes)
    return [
        replace(whole[source], name=name, region=region, fused="" if region is None else source)
        for name, source, region in layout
    ]


def refuse_renamed(model: Any, parameters: Sequence[tuple[str, Any]]) -> None:
    """Raise `SyncError` if ``parameters`` (name, parameter) are not in the layout of the model's checkpoints.

    For --vllm.sync_with_ray, where upstream sends each one as the trainer has it. vLLM refuses some, such as
    Mixtral's, and others are loaded into experts that it has packed. No other rank takes part.
    """
    shapes = {name: (getattr(each, "ds_shape", each.shape), each.dtype) for name, each in parameters}
    layout = checkpoint_layout(model, shapes)
    renamed = [(source, name) for name, source, region in layout if name != source or region is not None]
    if renamed:
        source, name = renamed[0]
        raise SyncError(
            "--vllm.sync_with_ray sends parameters as the trainer has them, but checkpoints of "
            f"{type(model).__name__}, which vLLM's loader knows, have {name} instead of {source}, and "
            f"{len(dict(renamed))} parameters differ like this: leave out --vllm.sync_with_ray"
        )


def lora_obstacle(arguments: Any) -> str:
    """Return why a run with LoRA cannot update its engines, "" if it can or has no adapters or engines.

    ``arguments`` are those of OpenRLHF's ``train_ppo_ray``.
    """
    if hasattr(arguments, "actor_num_nodes"):  # before 0.9
        is_quantized = getattr(arguments, "load_in_4bit", False)
        used = getattr(arguments, "lora_rank", 0) and arguments.vllm_num_engines
        return "--load_in_4bit: its weights cannot be merged; leave one out" if used and is_quantized else ""
    ds, vllm = arguments.ds, arguments.vllm
    if not getattr(getattr(ds, "lora", None), "rank", 0) or not vllm.num_engines:
        return ""
    obstacles = {
        "--ds.load_in_4bit: its weights cannot be merged; leave one out": getattr(ds, "load_in_4bit", False),
        "--ds.tensor_parallel_size > 1: it shards the adapters; use --ds.zero_stage 3 instead": (
            ds.tensor_parallel_size > 1
        ),
        "--vllm.sync_with_ray: it sends weights unmerged; leave it out": getattr(
            vllm, "sync_with_ray", False
        ),
    }
    return next((text for text, applies in obstacles.items() if applies), "")


def require_head(sent: Collection[str], never_sent: Collection[str]) -> None:
    """Raise `SyncError` if an engine's output layer keeps its first values while its embeddings do not.

    The trainer then ties both, and the engine does not. The names in ``sent`` and ``never_sent`` are vLLM's.
    """
    heads = [name for name in never_sent if name.endswith("lm_head.weight")]
    if heads and any(name.endswith("embed_tokens.weight") for name in sent):
        raise SyncError(
            f"weight sync: the engine has {heads[0]} of its own, and the trainer has none, as it shares the "
            "embeddings: remove lm_head.weight from the checkpoint if it equals them, or set "
            "tie_word_embeddings to false in its config.json"
        )
