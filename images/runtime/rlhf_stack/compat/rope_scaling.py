"""The scaling of rotary embeddings in vLLM 0.4.2: as transformers 4.46 computes it, or refused."""

import math
from collections.abc import Mapping
from typing import Any

from rlhf_stack.memory.rope_scaling import LONGEST, ORIGINAL, UNSCALED, fault, kind_of


def verified_rope_scaling(config: Any) -> Any:
    """Return the scaling of a model's configuration in the form that vLLM 0.4.2 reads, and keep it there.

    `ValueError` if vLLM computes it otherwise than transformers. vLLM reads ``type`` alone, and ``rope_type``
    is the name that transformers has for it since 4.43: Llama 3.1 has no ``type``, and each engine ended with
    ``KeyError: 'type'``. It also needs a fractional factor, and the original length, for which transformers
    has a default.
    """
    scaling = getattr(config, "rope_scaling", None)
    if not isinstance(scaling, Mapping):
        return scaling
    names = ("model_type", LONGEST, "rope_scaling")
    if found := fault({name: getattr(config, name, None) for name in names}):
        raise ValueError(f"{getattr(config, '_name_or_path', '') or 'this model'} has {found}")
    kind = kind_of(scaling)
    own = {**scaling, "type": kind} if scaling and kind != UNSCALED else None
    if own and type(own.get("factor")) is int:
        own["factor"] = float(own["factor"])
    if own and kind == "yarn" and own.get(ORIGINAL) is None:
        own[ORIGINAL] = getattr(config, LONGEST)
    config.rope_scaling = own
    return own


def llama3_frequencies(frequencies: Any, scaling: Mapping[str, Any]) -> Any:
    """Scale the tensor of inverse ``frequencies`` as Llama 3.1 does."""
    return frequencies.new_tensor([llama3_frequency(each, scaling) for each in frequencies.tolist()])


def llama3_frequency(frequency: float, scaling: Mapping[str, Any]) -> float:
    """Scale one inverse frequency as Llama 3.1 does.

    ``turns`` is how often it rotates within the original length. From ``high_freq_factor`` turns on it stays
    as it is, up to ``low_freq_factor`` it is divided by ``factor``, and between them it is a mixture.
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling[ORIGINAL] * frequency / (2 * math.pi)
    if turns > high:
        return frequency
    if turns < low:
        return float(frequency / scaling["factor"])
    kept = (turns - low) / (high - low)
    return float(frequency * (kept + (1 - kept) / scaling["factor"]))
