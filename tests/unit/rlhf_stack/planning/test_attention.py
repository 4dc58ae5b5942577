"""Models that would train with other attention than they were made with are problems of a plan."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from rlhf_stack.compat import attention_provider
from rlhf_stack.config import image
from rlhf_stack.memory.model_shape import shape_from_config
from rlhf_stack.planning import assess, attention, uniform_machines
from rlhf_stack.planning.tuning import FLASH, tune

from tests.unit.rlhf_stack.planning.test_planning import SMALL, run

PLAIN = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 99,
}
MACHINES = uniform_machines(2, 8, 80, 64, 999)


@pytest.fixture(autouse=True)
def image_of_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image without flash_attn, whose FlashAttention is torch's."""
    monkeypatch.setattr(attention, "find_spec", lambda _: None)
    monkeypatch.setattr(image, "about", lambda: SimpleNamespace(cell="a-cell"))
    monkeypatch.setattr(attention_provider, "provider", lambda: "torch's")


@pytest.mark.parametrize(
    ("config", "recurrent", "feature"),
    [
        ({}, False, ""),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, False, ""),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, True, ""),
        ({"layer_types": ["conv", "conv", "full_attention", "conv"]}, True, ""),
        ({"layers_block_type": ["mamba", "attention"] * 2}, True, ""),
        ({"layers_block_type": [3, None]}, False, ""),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, False, "softcapping of attention scores"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": None, "head_dim": 16}, False, ""),
        ({"model_type": "gpt_oss"}, False, "attention sinks"),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192}, False, "sparse or chunked attention"),
        ({"model_type": "glm_moe_dsa", "index_topk": 2048}, False, "sparse or chunked attention"),
    ],
)
def test_a_config_states_what_its_attention_needs(
    config: dict[str, object], recurrent: bool, feature: str
) -> None:
    shape = shape_from_config(PLAIN | config)
    assert (shape.recurrent, shape.attention) == (recurrent, feature)


@pytest.mark.parametrize("release", ["0.11.2", "0.5.1"])
def test_packed_samples_of_a_recurrent_model_are_refused(release: str) -> None:
    shapes = {"small": replace(SMALL, recurrent=True)}
    (problem,) = assess(run(packed=True, release=release), MACHINES, shapes).problems
    assert "small has layers that pass a state from token to token" in problem
    assert ("--ds.packing_samples" in problem) == (release == "0.11.2")
    assert not assess(run(packed=False), MACHINES, shapes).problems


@pytest.mark.parametrize("feature", ["attention sinks", "softcapping of attention scores"])
def test_a_feature_that_nothing_here_computes_is_refused(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"small": replace(SMALL, attention=feature)}
    (problem,) = assess(run(attention=FLASH), MACHINES, shapes).problems
    assert f"small has {feature}" in problem
    assert "give --ds.attn_implementation eager" in problem
    assert not assess(run(attention="eager"), MACHINES, shapes).problems
    assert assess(run(attention="eager", packed=True), MACHINES, shapes).problems, "OpenRLHF replaces eager"
    monkeypatch.setattr(attention, "find_spec", lambda _: "flash_attn")
    assert not assess(run(attention=FLASH), MACHINES, shapes).problems
    monkeypatch.setattr(attention, "find_spec", lambda _: None)
    monkeypatch.setattr(image, "about", lambda: SimpleNamespace(cell=""))
    assert not assess(run(attention=FLASH), MACHINES, shapes).problems, "what the run's image has is unknown"


def test_tune_chooses_attention_that_the_models_have() -> None:
    shapes = {"small": replace(SMALL, attention="attention sinks")}
    assert tune(run(attention=FLASH), MACHINES, shapes).run.attention == "eager"
    assert tune(run(attention=FLASH), MACHINES, {"small": SMALL}).run.attention == FLASH
