"""Parameters of a decoder by the dimensions in its config.json: what each kind of layer stores.

A family that is not known is counted by the same keys: grouped queries or latent attention, gated or plain
MLP, experts, linear attention. ``tests/image/test_model_families.py`` compares with transformers.
"""

from collections.abc import Callable, Mapping
from typing import Any

QKV_BIAS = (
    "qwen2",
    "qwen2_moe",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen2_vl",
    "qwen2_5_vl",
    "gpt_oss",
    "gpt2",
)
OUTPUT_BIAS = ("gpt_oss", "gpt2")
HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3", "qwen3_5", "qwen3_5_moe", "qwen3_next")
FOUR_NORMS = ("gemma2", "gemma3")
GATED_QUERIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
TIED = ("gemma", "gemma2", "gemma3", "gpt2")  # if the config does not say
KNOWN = ("llama", "mistral", "mixtral", "gemma", "deepseek_v3", *QKV_BIAS, *HEAD_NORMS, *FOUR_NORMS)
LINEAR = "linear_attention"
RECURRENT = {LINEAR, "conv", "mamba"}  # types of layers
# What transformers takes where the config.json of a family omits it.
HYBRID = {"full_attention_interval": 4}
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "gemma3": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
    },
    **dict.fromkeys(GATED_QUERIES, HYBRID),
}

Read = Callable[[str], int]  # a dimension of the config, 0 if it has none


def family_of(config: Mapping[str, Any]) -> str:
    """The family of a text config: its model type, without the ending of the text part of a larger model."""
    family = str(config.get("model_type", ""))
    return family.removesuffix("_text") if family.removesuffix("_text") in KNOWN else family


def layer_parameters(read: Read, config: Mapping[str, Any], family: str) -> int:
    """Parameters of all layers."""
    layers, linear = read("num_hidden_layers"), linear_layers(read, config)
    attention = latent_attention(read) if read("kv_lora_rank") else grouped_attention(read, config, family)
    dense = read("first_k_dense_replace") if experts(read) else layers
    hidden = read("hidden_size")
    norms = hidden * ((4 if family in FOUR_NORMS else 2) * (2 if family == "gpt2" else 1))
    return (
        (layers - linear) * attention
        + linear * linear_attention(read)
        + dense * mlp(read, family)
        + (layers - dense) * expert_mlp(read, family)
        + layers * norms
    )


def linear_layers(read: Read, config: Mapping[str, Any]) -> int:
    """The number of layers with linear attention: those listed, or all but the last of each interval."""
    layers, interval = read("num_hidden_layers"), read("full_attention_interval")
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return kinds.count(LINEAR)
    return layers - layers // interval if interval else 0


def is_recurrent(read: Read, config: Mapping[str, Any]) -> bool:
    """Whether layers pass a state from token to token: linear attention, short convolutions, Mamba."""
    kinds = [config.get(key) for key in ("layer_types", "layers_block_type")]
    listed = {
        kind for listed in kinds if isinstance(listed, list) for kind in listed if isinstance(kind, str)
    }
    return bool(linear_layers(read, config) or listed & RECURRENT)


def special_attention(read: Read, config: Mapping[str, Any], family: str) -> str:
    """The feature of the attention that torch's FlashAttention does not compute; "" if there is none."""
    if config.get("attn_logit_softcapping"):
        return "softcapping of attention scores"
    if family == "gpt_oss":
        return "attention sinks"
    return "sparse or chunked attention" if read("attention_chunk_size") or read("index_topk") else ""


def experts(read: Read) -> int:
    """Experts of a layer; 0 for a dense model."""
    return read("num_experts") or read("num_local_experts") or read("n_routed_experts")


def grouped_attention(read: Read, config: Mapping[str, Any], family: str) -> int:
    """Parameters of attention with queries, keys and values of their own numbers of heads."""
    hidden, heads, head_dim = read("hidden_size"), read("num_attention_heads"), read("head_dim")
    queries, keys = heads * head_dim, read("num_key_value_heads") * head_dim
    found = hidden * (queries * (2 if family in GATED_QUERIES else 1) + 2 * keys) + queries * hidden
    if config.get("attention_bias", family in QKV_BIAS):
        found += queries + 2 * keys
        found += hidden if family in OUTPUT_BIAS or config.get("attention_bias") else 0
    return found + (2 * head_dim if family in HEAD_NORMS else 0) + (heads if family == "gpt_oss" else 0)


def latent_attention(read: Read) -> int:
    """Parameters of multi-head latent attention (DeepSeek V2 and V3)."""
    hidden, heads, rank = read("hidden_size"), read("num_attention_heads"), read("kv_lora_rank")
    rope, nope, value = read("qk_rope_head_dim"), read("qk_nope_head_dim"), read("v_head_dim")
    queries, low = heads * (nope + rope), read("q_lora_rank")
    found = hidden * low + low + low * queries if low else hidden * queries
    found += hidden * (rank + rope) + rank + rank * heads * (nope + value)
    return found + heads * value * hidden


def linear_attention(read: Read) -> int:
    """Parameters of a gated delta net (Qwen3-Next, Qwen3.5)."""
    hidden, values = read("hidden_size"), read("linear_num_value_heads")
    keys = 2 * read("linear_num_key_heads") * read("linear_key_head_dim")
    width = values * read("linear_value_head_dim")
    found = hidden * (keys + width) + hidden * width + 2 * hidden * values  # and gate, scalars
    found += (keys + width) * read("linear_conv_kernel_dim") + 2 * values + read("linear_value_head_dim")
    return found + width * hidden


def mlp(read: Read, family: str) -> int:
    """Parameters of a dense MLP: gated, but with two matrices and biases in GPT-2."""
    hidden, width = read("hidden_size"), read("intermediate_size")
    return 2 * hidden * width + hidden + width if family == "gpt2" else 3 * hidden * width


def expert_mlp(read: Read, family: str) -> int:
    """Parameters of the experts of a layer, their router, and the experts that all tokens share."""
    hidden, count = read("hidden_size"), experts(read)
    width = read("moe_intermediate_size") or read("intermediate_size")
    shared = read("shared_expert_intermediate_size") or read("n_shared_experts") * width
    found = count * 3 * hidden * width + count * hidden + 3 * hidden * shared
    if family == "gpt_oss":
        found += count * (2 * width + hidden) + count  # biases
    return found + (hidden if read("shared_expert_intermediate_size") else 0)  # its gate


def vision_parameters(config: Mapping[str, Any], read: Read) -> int:
    """Parameters of the vision part of Qwen2.5-VL; 0 for a part that is not known."""
    if config.get("model_type") not in ("qwen2_5_vl", "qwen2_5_vl_vision"):
        return 0
    hidden, width, depth = read("hidden_size"), read("intermediate_size"), read("depth")
    patch = read("in_channels") * read("temporal_patch_size") * read("patch_size") ** 2
    block = 2 * hidden + 4 * hidden * hidden + 4 * hidden + 3 * hidden * width + 2 * width + hidden
    merged = hidden * read("spatial_merge_size") ** 2
    merger = hidden + merged * merged + merged + merged * read("out_hidden_size") + read("out_hidden_size")
    return patch * hidden + depth * block + merger
