"""The last batch of an episode, where the prompts do not fill it: only what all ranks can train alike.

OpenRLHF 0.11 trains whatever is left. It gives each rank the same number of micro batches, rounded up, so
the last ranks have fewer or none (`RayActorGroup.async_run_method_batch`): a loader without samples fails;
with ZeRO-3 the others wait for forward passes that never come. A number of samples that is no multiple of
``train.batch_size`` leaves accumulated gradients to the next batch, whose optimizer steps are shifted.
"""

import math
from collections.abc import Iterator
from typing import Any

from rlhf_stack.telemetry import run_log


def leave_out_incomplete_batch(samples: list[Any], args: Any, *, is_drained: bool) -> list[Any]:
    """Return the first of the ``samples`` of a step that fill whole batches; logged if some are left out.

    Each is one answer; those to the same prompt follow each other. Only the last step of an episode, when the
    loader of prompts ``is_drained``, is changed.
    """
    if not is_drained or not 0 < len(samples) < _full(args):
        return samples
    unit = _unit(args)
    kept = samples[: len(samples) // unit * unit]
    if len(kept) < len(samples):
        run_log.warning(
            f"the last {len(samples) - len(kept)} samples of this episode are left out: of {len(samples)}, "
            f"multiples of {unit} can be divided by --train.batch_size and by the micro batches of all ranks"
        )
    return kept


def check_trained(step: int, args: Any) -> None:
    """Raise `RuntimeError` at the end of a run without any ``step``: upstream saves the model as it was."""
    if step > 0:
        return
    count = args.rollout.n_samples_per_prompt
    filtered = " that the dynamic filter keeps" * bool(args.algo.dynamic_filtering_enable)
    raise RuntimeError(
        "nothing was trained, and no model is saved: an episode needs at least "
        f"{_unit(args) // count} prompts{filtered}, with {count} samples each; give more prompts "
        "(--data.prompt_dataset, --data.max_samples) or reduce --train.batch_size, --rollout.batch_size or "
        "--rollout.micro_batch_size"
    )


def _full(args: Any) -> int:
    return int(args.rollout.batch_size * args.rollout.n_samples_per_prompt)


def _unit(args: Any) -> int:
    """The samples of the smallest batch that can be trained; a full batch, if its own size is no multiple.

    Dynamic batches, which the trainer makes as many of as there are ranks, have no fixed size.
    """
    micro = 1 if args.train.dynamic_batch_enable else args.rollout.micro_batch_size
    each = (micro * ranks for ranks in _data_parallel_ranks(args))
    unit = math.lcm(args.rollout.n_samples_per_prompt, args.train.batch_size, *each)
    full = _full(args)
    return full if full % unit else unit


def _data_parallel_ranks(args: Any) -> Iterator[int]:
    """Of each role that exists, as in upstream's ``train_ppo_ray.train``."""
    roles = [args.actor]
    if args.algo.kl.init_coef > 0:
        roles.append(args.ref)
    if args.critic.model_name_or_path:
        roles.append(args.critic)
    if not args.reward.remote_url:
        roles.append(args.reward)
    for role in roles:
        gpus = role.num_nodes * role.num_gpus_per_node
        yield gpus // (args.ds.ring_attn_size * args.ds.tensor_parallel_size)
