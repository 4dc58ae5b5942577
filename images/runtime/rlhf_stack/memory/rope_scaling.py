"""Scalings of rotary embeddings (``rope_scaling`` of a config.json) that vLLM 0.4.2 has not or has otherwise.

An engine that rotates otherwise than the trainer samples from another model than the trainer scores, without
an error. vLLM's are in model_executor/layers/rotary_embedding.py, those of transformers 4.46 in
modeling_rope_utils.py.
"""

from collections.abc import Mapping
from typing import Any

UNSCALED, LLAMA_3 = "default", "llama3"
SERVED = (UNSCALED, "linear", "yarn", LLAMA_3)
# Families whose layers in vLLM 0.4.2 do not pass the scaling on, and that transformers scales.
NOT_PASSED_ON = ("falcon", "gpt_neox", "olmo", "phi", "stablelm", "starcoder2")
# Of yarn: transformers reads the first alone, vLLM 0.4.2 the others alone.
READ_BY_ONE = ("attention_factor", "attn_factor", "extrapolation_factor")
ORIGINAL, LONGEST = "original_max_position_embeddings", "max_position_embeddings"
OTHER_IMAGE = "use an image with vLLM 0.29"


def fault(config: Mapping[str, Any]) -> str:
    """The scaling of a model that vLLM 0.4.2 does not compute as transformers does; "" if there is none.

    The text includes the remedy. vLLM applies the base that ``dynamic`` has at the greatest length to every
    length, transformers none up to the trained length. The first and the last dimension that ``yarn``
    interpolates follow from the original length in vLLM, in transformers from ``max_position_embeddings``.
    ``longrope``, to which transformers renames ``su`` of Phi-3, is unknown to vLLM, and its ``su`` has other
    factors for cos and sin.
    """
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, Mapping) or not scaling:
        return ""
    kind, family, remedy = kind_of(scaling), config.get("model_type"), OTHER_IMAGE
    original, longest = scaling.get(ORIGINAL), config.get(LONGEST)
    alone = [name for name in READ_BY_ONE if scaling.get(name) is not None]
    what = f"rotary embeddings of the type {kind!r} (rope_scaling)"
    if kind == "dynamic":
        remedy += ", or leave rope_scaling out of its config.json if no sequence has more tokens than its "
        remedy += LONGEST
    elif kind == UNSCALED:
        return ""
    elif kind in SERVED and family in NOT_PASSED_ON:
        what += f" in the family {family}"
    elif kind == "yarn" and alone:
        what, remedy = f"{what} with {' and '.join(alone)}", f"leave out {' and '.join(alone)}"
    elif kind == "yarn" and None not in (original, longest) and original != longest:
        what += f" with {LONGEST} {longest} and {ORIGINAL} {original}"
        remedy += f", or set {LONGEST} to {original} in its config.json"
    elif kind in SERVED:
        return ""
    return f"{what}, which vLLM 0.4.2 does not compute as transformers does: {remedy}"


def kind_of(scaling: Mapping[str, Any]) -> str:
    """The type of a scaling. transformers copies ``type`` over ``rope_type``, where both are given."""
    return str(scaling.get("type") or scaling.get("rope_type") or UNSCALED)
