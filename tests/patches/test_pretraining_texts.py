"""A rank that reads --pretrain_data does not wait for a process that missed a signal."""

import pytest

# A process of the rank is stopped, and so misses SIGTERM, as it can with the Python handler of a Ray worker.
PROBE = """
on_cpu()
import signal

import datasets
import multiprocess.pool

from rlhf_stack.demo import tiny_run
from rlhf_stack.openrlhf import command_line

SECONDS, TEXTS = 60, [f"{number} + {number}" for number in range(16)]
args = command_line.parse([
    *tiny_run.train_arguments("separate", Path.cwd(), steps=1, seed=0), "--pretrain_data", "texts.jsonl",
]).values

from openrlhf.trainer.ray import ppo_actor


def hang(*_):
    for child in multiprocess.active_children():
        child.kill()
    raise TimeoutError("the rank waits for a process that missed SIGTERM")


def loader(rows, *_):
    loaded.append(rows)
    return [rows]


def terminate(pool):
    os.kill(pool._pool[0].pid, signal.SIGSTOP)
    upstream(pool)


loaded, upstream = [], multiprocess.pool.Pool.terminate
replace(multiprocess.pool.Pool, terminate=terminate)
signal.signal(signal.SIGALRM, hang)
replace(
    ppo_actor,
    blending_datasets=lambda *_, **__: datasets.Dataset.from_dict({"input": TEXTS}),
    PromptDataset=lambda rows, *_, **__: rows,
)
strategy = stub("the strategy of a rank", args=args, world_size=1, setup_dataloader=loader)
actor = ppo_actor.ActorModelRayActor.__ray_metadata__.modified_class
rank = actor.__new__(actor)
rank.strategy, rank.tokenizer = strategy, None
signal.alarm(SECONDS)
rank.prepare_datasets()
signal.alarm(0)
assert list(loaded[-1].prompts) == TEXTS, loaded[-1].prompts
print(f"the rank has {len(TEXTS)} texts")
"""


@pytest.mark.patch("openrlhf/0.5.1/0039-read-pretraining-texts-in-one-process")
def test_a_rank_does_not_wait_for_a_process_that_missed_a_signal(proves):
    proves(PROBE, "TimeoutError: the rank waits for a process that missed SIGTERM")
