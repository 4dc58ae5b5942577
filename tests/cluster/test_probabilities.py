"""Verification by log-probabilities: engines that compute something else end the run."""

from types import SimpleNamespace

import pytest
import torch
from rlhf_stack.config import env_vars
from rlhf_stack.sync import SyncError, SyncMismatch, probabilities
from rlhf_stack.telemetry import events

SPECIAL = 3


class Actor(torch.nn.Module):
    """The trainer's model; it refuses a temperature, with which engines do not compute."""

    temperature = 0.5

    def forward(self, sequences, action_mask, attention_mask, ring_attn_group):
        assert attention_mask.all()
        assert ring_attn_group is None
        assert not self.training
        assert self.temperature == 1.0
        assert action_mask.shape[1] == sequences.shape[1] - 1
        return -sequences[:, 1:].float() / 100


def trainer(*errors, **arguments):
    """A trainer whose engines compute its log-probabilities plus an error."""
    text = SimpleNamespace(vocab_size=50, eos_token_id=SPECIAL)
    text.get_text_config = lambda: text
    actor = Actor()
    actor.model = SimpleNamespace(module=SimpleNamespace(config=text))

    def engine(error):
        return SimpleNamespace(
            log_probabilities=SimpleNamespace(
                remote=lambda tokens: [-token / 100 + error for token in tokens[1:]]
            )
        )

    sections = {"vllm": SimpleNamespace(enable_sleep=False), "train": SimpleNamespace(**arguments)}
    return SimpleNamespace(
        actor=actor,
        strategy=SimpleNamespace(args=SimpleNamespace(**sections)),
        vllm_engines=[engine(error) for error in errors],
    )


@pytest.fixture(autouse=True)
def recorded(monkeypatch, tmp_path):
    monkeypatch.setenv(env_vars.EVENTS, str(tmp_path))
    monkeypatch.setattr(probabilities, "wait_for_engine_results", lambda references, _: references)
    return tmp_path


def test_small_differences_are_recorded(recorded):
    one = trainer(0.0, 0.05)
    probabilities.verify_probabilities(one, 4, is_root=True)
    (event,) = events.read(recorded)
    assert (event["event"], event["index"]) == ("verify probabilities", 4)
    assert event["differences"] == pytest.approx([0.0, 0.05], abs=1e-5)
    assert one.actor.temperature == 0.5
    assert one.actor.training


@pytest.mark.parametrize("error", [0.3, float("nan")])
def test_an_engine_that_computes_something_else_is_named(error):
    one = trainer(0.0, error)
    one.engine_indices = [0, 2]  # engine 1 is lost
    with pytest.raises(SyncMismatch, match=r"after sync 0 .* is \{2: '(0\.3|nan)'\} nats by engine"):
        probabilities.verify_probabilities(one, 0, is_root=True)


def test_an_engine_that_cannot_generate_during_a_sync_is_refused():
    with pytest.raises(SyncError, match=r"--train\.partial_rollout_enable, or use RLHF_STACK_VERIFY_SYNC=1"):
        probabilities.verify_probabilities(trainer(partial_rollout_enable=True), 0, is_root=True)


def test_the_tokens_are_ordinary_and_always_the_same():
    configuration = trainer().actor.model.module.config
    tokens = probabilities.fixed_tokens(configuration)
    assert len(tokens) == probabilities.COUNT
    assert SPECIAL not in tokens
    assert tokens == probabilities.fixed_tokens(configuration)
