"""The parameters that plan computes from a config.json are those that transformers creates."""

import pytest
import torch
from rlhf_stack.memory.model_shape import shape_from_config
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text")
FAMILIES += ("gpt2", "gpt_oss", "deepseek_v3", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.mark.parametrize("family", [name for name in FAMILIES if name in CONFIG_MAPPING_NAMES])
def test_parameters_of_the_default_config(family):
    config = AutoConfig.for_model(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert shape_from_config(config.to_dict()).total == expected
