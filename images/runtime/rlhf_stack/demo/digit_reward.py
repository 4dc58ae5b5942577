"""A reward function for OpenRLHF's ``--reward.remote_url``: the share of digits in the response."""

from collections.abc import Sequence
from typing import Any

from rlhf_stack.lazy import torch

SPECIAL = ("<eos>", "<pad>", "<bos>")


def share_of_digits(response: str) -> float:
    """The share of digits in ``response``, from 0 to 1; 0 for an empty response."""
    for token in SPECIAL:
        response = response.replace(token, "")
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: Any
) -> "dict[str, torch.Tensor | dict[str, torch.Tensor]]":
    """The interface of OpenRLHF: ``queries`` are prompt and response, ``prompts`` their prompts."""
    del labels
    rewards = torch.tensor(
        [share_of_digits(query[len(prompt) :]) for query, prompt in zip(queries, prompts, strict=True)]
    )
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
