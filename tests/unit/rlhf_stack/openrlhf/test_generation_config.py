"""rlhf_stack.openrlhf.generation_config: a model with inconsistent settings can be saved."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.openrlhf.generation_config import make_generation_config_valid
from rlhf_stack.telemetry import run_log


class Settings(SimpleNamespace):
    """Replaces transformers.GenerationConfig, whose temperature requires ``do_sample`` and is above 0."""

    def validate(self, strict: bool) -> None:
        assert strict
        temperature = getattr(self, "temperature", None)
        if temperature == 0 or (temperature and not getattr(self, "do_sample", False)):
            raise ValueError("GenerationConfig is\ninvalid")


IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


@pytest.mark.parametrize(
    ("given", "kept", "logged"),
    [
        ({}, {}, 0),
        ({"do_sample": True, "temperature": 0.6}, {"do_sample": True, "temperature": 0.6}, 0),
        ({"temperature": 0.9}, {"do_sample": True, "temperature": 0.9}, 1),
        ({"temperature": 0.0}, {}, 1),
    ],
)
def test_only_an_inconsistent_configuration_is_changed_and_logged(
    given: dict[str, Any], kept: dict[str, Any], logged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = ModuleType("transformers")
    lines: list[str] = []
    vars(transformers)["GenerationConfig"] = Settings
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setattr(run_log, "warning", lines.append)
    model = SimpleNamespace(generation_config=Settings(**IDS, **given))
    make_generation_config_valid(model)
    assert vars(model.generation_config) == IDS | kept
    assert len(lines) == logged
    assert all("GenerationConfig is invalid" in line for line in lines)


def test_a_model_that_does_not_generate_has_none() -> None:
    make_generation_config_valid(SimpleNamespace())
