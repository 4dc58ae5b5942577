"""The scaling of rotary embeddings that vLLM 0.4.2 computes as transformers does, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.compat.rope_scaling import llama3_frequency, verified_rope_scaling
from rlhf_stack.memory.model_shape import shape_from_config
from rlhf_stack.memory.rope_scaling import fault
from rlhf_stack.planning import assess

from tests.unit.rlhf_stack.planning.test_planning import CLUSTER, SMALL, run

LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


def model(scaling: Any, family: str = "qwen2", longest: int = 32768) -> SimpleNamespace:
    return SimpleNamespace(
        rope_scaling=scaling, model_type=family, max_position_embeddings=longest, _name_or_path="a-model"
    )


@pytest.mark.parametrize(
    ("config", "reason", "remedy"),
    [
        (
            model({"type": "dynamic", "factor": 2.0}),
            "'dynamic'",
            "or leave rope_scaling out of its config.json",
        ),
        (model({"rope_type": "dynamic", "factor": 2.0}), "'dynamic'", "vLLM 0.29"),
        (model(LONGROPE, "phi3"), "'longrope'", "use an image with vLLM 0.29"),
        (model(LONGROPE | {"type": "su"}, "phi3small"), "'su'", "vLLM 0.29"),
        (model({"type": "mrope", "mrope_section": [1]}), "'mrope'", "vLLM 0.29"),
        (model({"type": 3}), "'3'", "vLLM 0.29"),
        (model({"type": "linear", "factor": 2.0}, "starcoder2"), "in the family starcoder2", "vLLM 0.29"),
        (model(YARN, longest=131072), "max_position_embeddings 131072 and", "or set max_position_embeddings"),
        (model(YARN | {"attention_factor": 1.0}), "with attention_factor", "leave out attention_factor"),
    ],
)
def test_a_scaling_that_vllm_computes_otherwise_is_refused(
    config: SimpleNamespace, reason: str, remedy: str
) -> None:
    """Of most of them the engine sampled from another model than the trainer scored, without an error."""
    with pytest.raises(ValueError, match=r"^a-model has rotary embeddings of the type '") as raised:
        verified_rope_scaling(config)
    assert reason in str(raised.value)
    assert remedy in str(raised.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (model(None), None),
        (SimpleNamespace(), None),
        (model({"rope_type": "default"}), None),
        (model({}), None),
        (model(LLAMA_3, "llama", 131072), LLAMA_3 | {"type": "llama3"}),
        (model(YARN), YARN),
        (
            model({"rope_type": "yarn", "factor": 4}),
            {"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
        (model({"type": "linear", "factor": 2}, "llama"), {"type": "linear", "factor": 2.0}),
    ],
)
def test_vllm_gets_the_form_that_it_reads(config: SimpleNamespace, expected: dict[str, Any] | None) -> None:
    """It raised KeyError for a scaling without ``type``, and TypeError for a whole factor."""
    given = getattr(config, "rope_scaling", None)
    before = dict(given or {})
    found = verified_rope_scaling(config)
    assert found == expected
    assert found is None or isinstance(found["factor"], float)
    assert getattr(config, "rope_scaling", None) == expected
    assert (given or {}) == before, "the caller's is as it was"
    assert verified_rope_scaling(config) == expected


def test_a_scaling_that_is_no_object_is_left_to_the_reader() -> None:
    assert fault({"rope_scaling": "yarn"}) == ""
    assert verified_rope_scaling(model([1])) == [1]


@pytest.mark.parametrize(
    ("turns", "factor"),
    [(40.0, 1.0), (4.001, 1.0), (4.0, 1.0), (2.5, (1 + 1 / 8) / 2), (1.0, 1 / 8), (0.999, 1 / 8), (0.0, 1)],
)
def test_a_frequency_of_llama_3_is_scaled_by_its_turns(turns: float, factor: float) -> None:
    frequency = turns * 2 * 3.141592653589793 / 8192
    assert llama3_frequency(frequency, LLAMA_3) == pytest.approx(frequency * factor, rel=1e-12)


@pytest.mark.parametrize(
    ("release", "scaling", "refused"),
    [
        ("0.5.1", {"type": "dynamic", "factor": 2.0}, True),
        ("0.5.1", LLAMA_3, False),
        ("0.11.2", {"type": "dynamic", "factor": 2.0}, False),
    ],
)
def test_a_plan_refuses_what_the_engines_of_the_run_refuse(
    release: str, scaling: dict[str, Any], refused: bool
) -> None:
    """Each engine ended when it started."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 99, "max_position_embeddings": 4096, **sizes}
    shape = replace(SMALL, rotary=shape_from_config(config | {"rope_scaling": scaling}).rotary)
    planned = run(release=release)
    problems = list(assess(planned, CLUSTER, {"small": shape}).problems)
    assert [one for one in problems if one.startswith("small has rotary embeddings")] == problems
    assert bool(problems) == refused
    alone = replace(planned, request=replace(planned.request, engines=None))
    assert not assess(alone, CLUSTER, {"small": shape}).problems
