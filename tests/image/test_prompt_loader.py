"""A run that is continued draws the prompts of the undisturbed one (OpenRLHF 0.11: torchdata's loader)."""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

EPISODES = 3


def prompts(workers: int, size: int) -> Any:
    """Return the loader of ``size`` prompts, as `setup_dataloader` of OpenRLHF 0.11 makes it."""
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(7)
    return StatefulDataLoader(
        range(size),
        batch_size=1,
        shuffle=True,
        drop_last=True,
        collate_fn=list,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def batches(loader: Any, states: dict[str, Any], batch: int) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Yield the prompts of each step, and the states of a checkpoint after it, as the loops of upstream."""
    if states["data_loader_state_dict"]:
        loader.load_state_dict(states["data_loader_state_dict"])
    step = states["global_step"]
    for episode in range(states["episode"], EPISODES):
        drawn, is_drained = iter(loader), False
        while not is_drained:
            taken: list[int] = []
            while len(taken) < batch and not is_drained:
                one = next(drawn, None)
                is_drained = one is None
                taken += one or []
            if taken:
                step += 1
                state = copy.deepcopy(loader.state_dict())
                yield taken, {"episode": episode, "global_step": step, "data_loader_state_dict": state}


@pytest.mark.carries("openrlhf==0.11.2")  # 0.5 counts prompts instead of keeping the state of a loader
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [8, 10])
def test_a_continued_run_draws_the_prompts_of_the_undisturbed_one(workers: int, size: int) -> None:
    """After each step in batches of 4, also after the last one of an episode."""
    from rlhf_stack.compat.determinism import continues_from

    rollout = SimpleNamespace(batch_size=4, vllm_generate_batch_size=4)
    trainer = SimpleNamespace(args=SimpleNamespace(rollout=rollout))
    beginning = {"episode": 0, "global_step": 0, "data_loader_state_dict": {}}
    undisturbed = list(batches(prompts(workers, size), beginning, 4))
    assert len({tuple(taken) for taken, _ in undisturbed}) == len(undisturbed), "each episode has its order"
    for step, (_, states) in enumerate(undisturbed, 1):
        loaded = continues_from(lambda _, states=states: states)(trainer)
        continued = batches(prompts(workers, size), loaded, 4)
        assert [taken for taken, _ in continued] == [taken for taken, _ in undisturbed[step:]]
