"""Parameters of model families, from the dimensions of released models.

The expected numbers are those of transformers 5.15 for the same config, on its meta device.
"""

from typing import Any

import pytest
from rlhf_stack.memory import parse_shape
from rlhf_stack.memory.engine import token_bytes
from rlhf_stack.memory.model_shape import shape_from_config

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "tie_word_embeddings": False,
}
HYBRID = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": HYBRID * 8,
    "tie_word_embeddings": False,
}
QWEN3_5_MOE = QWEN3_5 | {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "layer_types": HYBRID * 10,
}
QWEN2_5_VL = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "tie_word_embeddings": False,
    "vision_config": {"model_type": "qwen2_5_vl_vision", "hidden_size": 3584, "out_hidden_size": 3584},
}
# As published: of Gemma 3 with images, Qwen2.5-VL 7B and Qwen3-Next 80B, which omit what transformers knows.
GEMMA3_12B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27},
}
GEMMA3_4B = GEMMA3_12B | {
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "head_dim": None,
    }
}
QWEN2_5_VL_7B = {
    "model_type": "qwen2_5_vl",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
        "patch_size": 14,
    },
}
QWEN3_NEXT = {name: value for name, value in QWEN3_5_MOE.items() if name != "layer_types"} | {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (GPT2, 124_439_808),
        (GEMMA3, 2_628_658_432),
        (GPT_OSS, 116_829_156_672),
        (DEEPSEEK_V3, 671_026_404_352),
        (QWEN3_5, 8_953_803_264),
        (QWEN3_5_MOE, 34_660_610_688),
        (QWEN2_5_VL, 75_789_228_800),
        (QWEN2_5_VL_7B, 8_292_166_656),
        (QWEN3_NEXT, 79_674_391_296),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_the_parameters_of_a_family_are_those_of_transformers(
    config: dict[str, Any], parameters: int
) -> None:
    shape = shape_from_config(config)
    assert shape.total == parameters
    assert not shape.estimated


def test_an_unknown_family_is_estimated_by_its_dimensions() -> None:
    shape = shape_from_config(GEMMA3 | {"model_type": "heard-of-tomorrow", "tie_word_embeddings": True})
    assert shape.estimated
    assert abs(shape.total / 2_628_658_432 - 1) < 0.01


@pytest.mark.parametrize(("config", "heads", "text"), [(GEMMA3_12B, 16, 11.77e9), (GEMMA3_4B, 8, 3.88e9)])
def test_dimensions_that_gemma_omits_are_those_of_its_class(
    config: dict[str, Any], heads: int, text: float
) -> None:
    """Without head_dim, 240 were computed; the vision part is not counted, which is said."""
    shape = shape_from_config(config)
    assert (shape.heads, shape.head_dim, shape.vocabulary) == (heads, 256, 262208)
    assert shape.kv_heads == heads // 2
    assert abs(shape.total / text - 1) < 0.001
    assert shape.estimated


@pytest.mark.parametrize("interval", [{}, {"full_attention_interval": 4}])
def test_every_fourth_layer_of_a_hybrid_is_cached_without_a_list_too(interval: dict[str, int]) -> None:
    assert shape_from_config(QWEN3_NEXT | interval).cached_layers == 12


def test_latent_attention_caches_one_vector_for_a_token_on_every_gpu() -> None:
    """576 numbers for each layer, instead of 2 x 128 heads x 56."""
    shape = shape_from_config(DEEPSEEK_V3)
    assert token_bytes(shape, 1) == token_bytes(shape, 8) == 2 * 61 * 576


def test_linear_attention_has_no_cache_that_grows() -> None:
    shape = shape_from_config(QWEN3_5)
    assert token_bytes(shape, 1) == 2 * 2 * 8 * 4 * 256


def test_typed_sizes_have_both_too() -> None:
    shape = parse_shape("layers:4,hidden:64,intermediate:64,heads:4,vocabulary:64,cached_layers:1,latent:9")
    assert token_bytes(shape, 1) == 2 * 9
