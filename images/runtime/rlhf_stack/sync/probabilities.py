"""Comparison of what trainer and engines compute after a sync: the log-probabilities of fixed tokens.

It depends neither on vLLM's loader nor on how vLLM arranges the weights. Equal weights give small
differences, because trainer and engine round in another order.
"""

import random
from collections.abc import Sequence
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.lazy import torch
from rlhf_stack.sync.actor_waits import wait_for_engine_results
from rlhf_stack.sync.errors import SyncError, SyncMismatch
from rlhf_stack.sync.trainer import engine_indices
from rlhf_stack.telemetry import events

COUNT = 24  # tokens
TOLERANCE = 0.1  # nats, of the mean difference


def verify_probabilities(trainer: Any, index: int, is_root: bool) -> None:
    """Compare the log-probabilities of OpenRLHF 0.11's ``ActorPPOTrainer`` and each engine, on every rank.

    The root rank records the result as an event. `SyncMismatch` if they differ by more than `TOLERANCE`.
    """
    refuse_unusable(trainer.strategy.args)
    tokens = fixed_tokens(trainer.actor.model.module.config)
    expected = _trainer_computes(trainer, tokens)
    if not is_root:
        return
    references = [engine.log_probabilities.remote(tokens) for engine in trainer.vllm_engines]
    answers = wait_for_engine_results(references, "the engines' log-probabilities")
    found = [mean_difference(expected, answer) for answer in answers]
    events.emit("verify probabilities", index=index, differences=found, tolerance=TOLERANCE)
    by_engine = zip(engine_indices(trainer), found, strict=True)
    differing = {engine: f"{value:.3g}" for engine, value in by_engine if not value <= TOLERANCE}
    if differing:
        raise SyncMismatch(
            f"after sync {index} engines compute other log-probabilities than the trainer: the mean "
            f"difference over {COUNT - 1} tokens is {differing} nats by engine, more than {TOLERANCE}"
        )


def refuse_unusable(arguments: Any) -> None:
    """Raise `SyncError` where an engine cannot generate when a sync ends."""
    if not hasattr(arguments, "vllm"):
        raise SyncError(f"{env_vars.VERIFY_SYNC}={env_vars.PROBABILITIES} needs OpenRLHF 0.11; use 1")
    sleeps = getattr(arguments.vllm, "enable_sleep", False)
    if sleeps or getattr(arguments.train, "partial_rollout_enable", False):
        raise SyncError(
            f"{env_vars.VERIFY_SYNC}={env_vars.PROBABILITIES} needs engines that are awake during a sync: "
            "leave out --vllm.enable_sleep and --train.partial_rollout_enable, or use "
            f"{env_vars.VERIFY_SYNC}=1"
        )


def fixed_tokens(configuration: Any) -> list[int]:
    """Return the same ordinary tokens of a model's vocabulary in every process."""
    text = configuration.get_text_config()
    special = {value for name, value in _token_ids(configuration, text) if name.endswith("_token_id")}
    choose = random.Random(0)  # noqa: S311
    ordinary = (choose.randrange(text.vocab_size) for _ in range(100 * COUNT))
    return [token for token in ordinary if token not in special][:COUNT]


def mean_difference(expected: Sequence[float], computed: Sequence[float]) -> float:
    """Return the mean of the absolute differences."""
    return sum(abs(a - b) for a, b in zip(expected, computed, strict=True)) / len(expected)


def _token_ids(*configurations: Any) -> list[tuple[str, int]]:
    pairs = (pair for each in configurations for pair in vars(each).items())
    return [(name, value) for name, value in pairs if isinstance(value, int)]


def _trainer_computes(trainer: Any, tokens: Sequence[int]) -> list[float]:
    actor = trainer.actor
    sequences = torch.tensor([list(tokens)], device=devices.torch_device())
    attention = torch.ones_like(sequences)
    was_training, temperature = actor.training, actor.temperature
    actor.eval()
    actor.temperature = 1.0
    try:
        with torch.no_grad():
            ring = getattr(trainer.strategy, "ring_attn_group", None)
            computed = actor(sequences, attention[:, 1:], attention, ring_attn_group=ring)
    finally:
        actor.train(was_training)
        actor.temperature = temperature
    values: list[float] = computed[0].float().tolist()
    return values
