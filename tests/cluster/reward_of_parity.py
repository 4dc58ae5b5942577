"""A reward function with the imports of those of OpenRLHF's examples: 1 for an even number of characters."""

import torch
from openrlhf.utils import extract_boxed_answer, grade_answer


def reward_func(queries, prompts, labels, **_):  # the interface of OpenRLHF
    """Return the rewards; each label is graded as an answer, by sympy."""
    for label in filter(None, labels):
        assert grade_answer(extract_boxed_answer(f"\\boxed{{{label}}}"), label)
    rewards = torch.tensor([float(len(query) % 2 == 0) for query in queries])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"even": rewards}}
