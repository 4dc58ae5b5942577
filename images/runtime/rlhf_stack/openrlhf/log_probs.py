"""Log-probabilities of 16-bit logits, computed in 32 bits without a 32-bit copy of all logits.

From transformers 4.46 on, models return logits in the type of their weights. OpenRLHF 0.5 computes the
log-probabilities in that type, and bf16 rounds one of -20 by up to 0.06: the ratios of PPO, the KL divergence
and the margins of DPO are then mostly rounding (OpenRLHF #634).
"""

import functools
from collections.abc import Iterator
from typing import Any

from rlhf_stack.lazy import torch
from rlhf_stack.memory import LOGIT_ROWS


def log_probs(logits: Any, labels: Any) -> Any:
    """Return the log-probability of each label, in 32 bits.

    ``logits``: (sequences, length, vocabulary); ``labels``: integers (sequences, length), as the result. The
    backward pass needs the logits and one number per token. The gradient has the type of the logits.
    """
    return _function().apply(logits, labels)


def language_model_loss(logits: Any, labels: Any, ignored: int) -> Any:
    """Return the mean negative log-probability of the labels that are not ``ignored``; shapes as above."""
    counted = labels != ignored
    return -log_probs(logits, labels.where(counted, 0))[counted].mean()


@functools.cache
def _function() -> Any:
    methods = {"forward": staticmethod(_forward), "backward": staticmethod(_backward)}
    return type("LogProbs", (torch.autograd.Function,), methods)


def _forward(ctx: Any, logits: Any, labels: Any) -> Any:
    result, normalizers = (torch.empty_like(labels, dtype=torch.float32) for _ in range(2))
    for rows, chosen, log_prob, normalizer in _blocks(logits, labels, result, normalizers):
        normalizer.copy_(_normalizer(rows))
        log_prob.copy_(rows.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - normalizer)
    ctx.save_for_backward(logits, labels, normalizers)
    return result


def _backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
    logits, labels, normalizers = ctx.saved_tensors
    result = torch.empty_like(logits)
    for rows, chosen, normalizer, factor, block in _blocks(logits, labels, normalizers, gradient, result):
        block.copy_(_gradient(rows, chosen, normalizer).mul_(factor.unsqueeze(-1)))
    return result, None


def _normalizer(rows: Any) -> Any:
    """Return ``rows.logsumexp(-1)`` in 32 bits, with one copy of ``rows`` in memory."""
    largest = rows.amax(-1, keepdim=True).float()
    return rows.to(torch.float32, copy=True).sub_(largest).exp_().sum(-1).log_().add_(largest.squeeze(-1))


def _gradient(rows: Any, chosen: Any, normalizer: Any) -> Any:
    """Return the derivative of the log-probabilities of ``chosen`` by the logits ``rows``, in 32 bits."""
    result = rows.to(torch.float32, copy=True).sub_(normalizer.unsqueeze(-1)).exp_().neg_()
    return result.scatter_add_(-1, chosen.unsqueeze(-1), torch.ones_like(result[:, :1]))


def _blocks(*tensors: Any) -> Iterator[tuple[Any, ...]]:
    """Yield views of at most `LOGIT_ROWS` tokens of one sequence, of all tensors together."""
    for sequences in zip(*tensors, strict=True):
        yield from zip(*(sequence.split(LOGIT_ROWS) for sequence in sequences), strict=True)
