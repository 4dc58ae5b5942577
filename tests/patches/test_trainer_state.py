"""What the trainer adapts continues from a checkpoint; tests/cluster and tests/network have whole runs."""

import pytest

SECTIONS = """
import ray
import torch

from openrlhf.trainer.ppo_trainer import BasePPOTrainer
from rlhf_stack.recovery import checkpoint_on_request

replace(ray, get=lambda references, **_: references)
SAVED, STEPS, NEVER = Path("_actor", "states"), 4, float("inf")


def some(**given):
    return types.SimpleNamespace(**given)


@stub("the ranks of the actor, which keep the client states of their checkpoint")
class Ranks:
    def __init__(self):
        self.coefficients = []

    def async_run_method_batch(self, method_name, **options):
        return []

    def async_run_method(self, method_name, client_states=None, kl_ctl=None, **options):
        if method_name == "save_checkpoint":
            torch.save(client_states, SAVED)
        if method_name == "get_checkpoint_states":
            return [torch.load(SAVED)]
        if method_name == "fit":
            self.coefficients.append(float(kl_ctl))
        return [{"kl": 0.0}]


def train(until, save_steps=NEVER, load=False):
    # Returns the trainer, and the coefficient of each of its steps.
    args = some(
        algo=some(kl=some(init_coef=0.1, target=6.0, horizon=8), advantage=some(estimator="reinforce")),
        ckpt=some(save_steps=save_steps, best_metric_key="", load_enable=load, path="."),
        critic=some(freezing_steps=-1),
        ds=some(enable_sleep=False),
        logger=some(wandb=some(key=None), tensorboard_dir=None, logging_steps=1),
        rollout=some(batch_size=1, n_samples_per_prompt=1),
        train=some(dynamic_batch_enable=False),
    )
    ones = torch.ones(1)
    experience = some(
        sequences=torch.ones(1, 2), rewards=ones, response_length=ones, truncated=ones, info={"reward": ones}
    )
    ranks, tokenizer = Ranks(), stub("the tokenizer", decode=lambda *_, **__: ["text"])
    trainer = BasePPOTrainer(some(args=args), ranks, None, None, None, None, tokenizer)
    trainer.experience_maker = stub(
        "the maker of experiences", make_experience_batch=lambda _: [experience]
    )
    step = trainer.init_checkpoint_states()["global_step"]
    while step < until:
        status, step = trainer.train_step(["samples"], step)
        trainer.save_logs_and_checkpoints(step, status, {"global_step": step})
    return trainer, ranks.coefficients


SAVED.parent.mkdir()
_, undisturbed = train(STEPS)
assert len(set(undisturbed)) == STEPS
for on_request in (False, True):
    stopped, _ = train(2, save_steps=NEVER if on_request else 2)
    if on_request:
        checkpoint_on_request._save(stopped)
    _, continued = train(STEPS, load=True)
    assert continued == undisturbed[2:], (
        f"step 3 has the coefficient {continued[0]}, and {undisturbed[2]} in the undisturbed run"
    )
    SAVED.unlink()
print("a continued run has the coefficients of the undisturbed one")
"""

FLAT = """
on_cpu()
import torch

from rlhf_stack.demo import tiny_run
from rlhf_stack.openrlhf import command_line

checkpoints, last = Path("checkpoints").absolute(), 2
one_each = "rollout_batch_size", "n_samples_per_prompt", "train_batch_size", "micro_train_batch_size"
args = command_line.parse([
    *tiny_run.train_arguments("separate", Path.cwd(), steps=1, seed=0),
    *(word for name in one_each for word in (f"--{name}", "1")),
    *("--init_kl_coef", "0.1", "--kl_target", "6", "--pretrain_data", "texts.jsonl", "--max_samples", "4"),
    *("--save_steps", "1", "--ckpt_path", str(checkpoints)),
]).values

from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ray import ppo_actor
from openrlhf.utils.distributed_sampler import DistributedSampler
from torch.utils.data import DataLoader


def some(**given):
    return types.SimpleNamespace(**given)


def prepared(given, **_):
    return given


def loader(rows, size, *_):
    return DataLoader(rows, batch_size=size, sampler=DistributedSampler(rows, num_replicas=1, rank=0))


def save(model, folder, tag, most, memory, states):
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(states, Path(folder, tag))


def load(model, folder):
    return folder, torch.load(Path(folder, f"global_step{last}"))


def nothing(*_, **__):
    return []


@stub("a data set, of prompts or texts")
class Rows(list):
    collate_fn = None

    def select(self, chosen):
        return self


strategy = stub(
    "the strategy of a rank",
    args=args, world_size=1, print=print, is_rank_0=lambda: True, prepare=prepared, setup_dataloader=loader,
    setup_distributed=nothing, create_optimizer=nothing, get_ds_train_config=nothing, save_ckpt=save,
    load_ckpt=load,
)
steps = []


def train(trainer, step):
    # Records what the step is trained with.
    steps.append((float(trainer.kl_ctl.value), next(trainer.pretrain_dataloader).item()))
    return {"kl": 0.0, "reward": 0.0}


replace(torch.distributed, barrier=nothing)
replace(
    ppo_actor,
    Actor=lambda *_, **__: some(model="the weights"),
    get_tokenizer=lambda *_, **__: some(pad_token_id=0, eos_token_id=1),
    get_scheduler=nothing,
    blending_datasets=lambda *_, **__: Rows(range(4)),
    PromptDataset=lambda rows, *_, **__: rows,
    SFTDataset=lambda rows, *_, **__: rows,
)
replace(ppo_actor.RemoteExperienceMaker, make_experience_list=nothing)
replace(ppo_trainer.NaiveReplayBuffer, normalize=nothing)
replace(ppo_actor.ActorPPOTrainer, ppo_train=train)


def run():
    steps.clear()
    actor = ppo_actor.ActorModelRayActor.__ray_metadata__.modified_class
    rank = actor.__new__(actor)
    rank._rank = 0
    rank.init_model_from_pretrained(strategy, "a model")
    rank.fit(None, None, ["a reward"])
    return list(steps)


undisturbed = run()
assert len(set(undisturbed)) == 4, undisturbed
args.load_checkpoint = True
continued, rest = run(), undisturbed[last:]
order = [batch for _, batch in undisturbed]
assert continued == rest, (
    f"step 3 has the coefficient {continued[0][0]} and the texts of step {order.index(continued[0][1]) + 1}"
)
print("a continued run has the coefficients and the pretraining data of the undisturbed one")
"""


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        pytest.param(
            SECTIONS,
            r"step 3 has the coefficient 0\.1, and 0\.09",
            marks=pytest.mark.patch("openrlhf/0.11.2/0059-continue-the-trainers-state"),
            id="0.11",
        ),
        pytest.param(
            FLAT,
            r"step 3 has the coefficient 0\.1 and the texts of step 1$",
            marks=pytest.mark.patch("openrlhf/0.5.1/0038-continue-the-trainers-state"),
            id="0.5",
        ),
    ],
)
def test_a_continued_run_has_the_state_of_the_undisturbed_one(proves, probe, reason):
    proves(probe, reason)
