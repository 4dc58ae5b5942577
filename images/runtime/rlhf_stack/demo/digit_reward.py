"""A rule as reward, for OpenRLHF's ``--reward.remote_url``: the share of digits in the response."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SPECIAL = ("<eos>", "<pad>", "<bos>")


def share_of_digits(response: str) -> float:
    """Between 0 and 1; an empty response has none."""
    for token in SPECIAL:
        response = response.replace(token, "")
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def reward_func(
    queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: Any
) -> "dict[str, torch.Tensor | dict[str, torch.Tensor]]":
    """OpenRLHF's interface: ``queries`` are prompt and response, ``prompts`` the beginning of each."""
    import torch

    del labels
    rewards = torch.tensor(
        [share_of_digits(query[len(prompt) :]) for query, prompt in zip(queries, prompts, strict=True)]
    )
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
