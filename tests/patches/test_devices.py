import pytest

# By the torch of the cell: built for CPUs, or for CUDA.
NO_CUDA = "Torch not compiled with CUDA enabled|Found no NVIDIA driver on your system|'_cuda_setDevice'"

# A step of actor and critic in this process, with batches of a fixed and of a dynamic size, and every role.
STEP = """
import torch

from rlhf_stack.demo import tiny_model, tiny_run
from rlhf_stack.openrlhf import command_line

folder = Path("files").absolute()
tiny_model.make(folder, seed=0, steps=1)
options = [
    *tiny_run.train_arguments("hybrid", folder, steps=1, seed=0),
    *("--critic.model_name_or_path", str(folder / "model"), "--train.enable_ema"),
    *("--critic.adam.lr", "1e-2", "--critic.lr_scheduler", "constant", "--critic.lr_warmup_ratio", "0"),
    *("--actor.num_nodes", "1", "--actor.num_gpus_per_node", "1"),
    *("--vllm.num_engines", "1", "--vllm.tensor_parallel_size", "1"),
    *("--rollout.batch_size", "2", "--rollout.n_samples_per_prompt", "2", "--rollout.micro_batch_size", "4"),
    *("--train.batch_size", "4", "--train.micro_batch_size", "4", "--train.max_tokens_per_gpu", "48"),
]
args = command_line.parse(options).values

from openrlhf.models.ring_attn_utils import reset_ring_attn_position_ids
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.launcher import ReferenceModelActor, RewardModelActor
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
from openrlhf.trainer.ray.ppo_critic import CriticModelActor
from openrlhf.utils import get_strategy

alone()


def rank(role, **options):
    own = role.__ray_metadata__.modified_class(1, 0, "127.0.0.1", None)
    own.init_model_from_pretrained(get_strategy(args), args.actor.model_name_or_path, **options)
    return own


SAMPLES, LENGTH, PROMPT = 4, 32, 16
ids = torch.randint(10, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
mask, each = torch.ones_like(ids), torch.ones(SAMPLES)
answer = (torch.arange(1, LENGTH) >= PROMPT).expand(SAMPLES, -1)


def trained(own):
    # The role's change, by a step, of what it computes.
    before = own.forward(ids, answer, mask)
    policy = {f"{name}action_log_probs": actor.forward(ids, answer, mask) for name in ("", "base_")}
    logs = policy["action_log_probs"]
    value = {name: torch.ones_like(logs) for name in ("values", "returns", "advantages", "kl")}
    counts = {"response_length": each * (LENGTH - PROMPT), "total_length": each.int() * LENGTH}
    texts = {name: [""] * SAMPLES for name in ("index", "prompts", "labels", "images", "mm_train_inputs")}
    own.append(Experience(
        sequences=ids, attention_mask=mask, action_mask=answer, rollout_log_probs=logs, rewards=each,
        scores=each, truncated=0 * each, info={"reward": each}, **policy, **value, **counts, **texts,
    ))
    own.reload_states()
    own.fit()
    own.offload_states()
    return (own.forward(ids, answer, mask) - before)[answer].mean()


for is_dynamic in (True, False):
    args.train.dynamic_batch_enable = is_dynamic
    actor, critic = rank(PolicyModelActor, max_steps=4), rank(CriticModelActor, max_steps=4)
    assert trained(actor) > 0, "the policy does not prefer the tokens that it was rewarded for"
    assert trained(critic) > 0, "the values do not approach the returns"
logs = actor.forward(ids, answer, mask)
assert not torch.equal(rank(ReferenceModelActor).forward(ids, answer, mask), logs)
assert rank(RewardModelActor).forward(ids, mask).shape == (SAMPLES,)
assert reset_ring_attn_position_ids(2, 8, [3, 2, 4, 1]).tolist() == [[2, 0, 1, 0, 1, 2]]
assert actor.strategy.all_gather(each).equal(each)
actor.form_weight_group({})
actor.empty_cache()
print("actor and critic take a step")
"""

# Every role of OpenRLHF 0.5: with the actor's samples and pretraining data, then with an engine's, packed.
STEP_FLAT = """
import torch

from rlhf_stack.demo import tiny_model, tiny_run
from rlhf_stack.openrlhf import command_line

folder = Path("files").absolute()
tiny_model.make(folder, seed=0, steps=1)
args = command_line.parse([
    *tiny_run.train_arguments("separate", folder, steps=1, seed=0),
    *("--rollout_batch_size", "2", "--n_samples_per_prompt", "2", "--micro_rollout_batch_size", "4"),
    *("--train_batch_size", "4", "--micro_train_batch_size", "4", "--max_samples", "8"),
    *("--pretrain_data", str(folder / "prompts.jsonl")),
]).values

import ray
from openrlhf.cli.train_ppo_ray import reward_fn
from openrlhf.trainer.ppo_utils import FixedKLController, RemoteExperienceMaker
from openrlhf.trainer.ray.launcher import ReferenceModelRayActor, RewardModelRayActor
from openrlhf.trainer.ray.ppo_actor import ActorModelRayActor
from openrlhf.trainer.ray.ppo_critic import CriticModelRayActor
from openrlhf.utils import get_strategy

alone()
replace(ray, get=lambda references, **_: references)


@stub("the handle of a role, which calls it in this process")
class Handle:
    def __init__(self, role, path, *options):
        self.own = role.__ray_metadata__.modified_class(1, 0, 0, "127.0.0.1", None)
        self.own.init_model_from_pretrained(get_strategy(args), str(folder / path), *options)

    def __getattr__(self, name):
        return types.SimpleNamespace(remote=getattr(self.own, name))


def roles():
    actor, critic = Handle(ActorModelRayActor, "model"), Handle(CriticModelRayActor, "model", 4)
    return actor.own, critic, Handle(ReferenceModelRayActor, "model"), Handle(RewardModelRayActor, "reward")


def weights(model):
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def generate(sampling_params, prompt_token_ids):
    # Each answer is its prompt.
    answers = [types.SimpleNamespace(token_ids=tokens) for tokens in prompt_token_ids]
    return [types.SimpleNamespace(prompt_token_ids=one.token_ids, outputs=[one]) for one in answers]


actor, critic, reference, reward = roles()
models = {"policy": actor.actor.model, "values": critic.own.critic}
before = {name: weights(model) for name, model in models.items()}
actor.fit(critic, reference, [reward], reward_fn=reward_fn, critic_train_remote=True)
for name, model in models.items():
    assert not weights(model).equal(before[name]), f"training does not change the weights of the {name}"
each = torch.ones(2)
assert actor.strategy.all_gather(each).equal(each)

args.packing_samples = args.flash_attn = True
actor, critic, reference, reward = roles()
engine = stub("an engine, which repeats the prompts", generate=types.SimpleNamespace(remote=generate))
maker = RemoteExperienceMaker(
    actor.actor, critic, [reward], reference, actor.tokenizer, 48, FixedKLController(0), actor.strategy,
    None, reward_fn, vllm_engines=[engine], packing_samples=True,
)
[packed] = maker.make_experience_list(["one", "two and two"], gamma=1, lambd=1)
assert [len(one) for one in packed.sequences] == packed.info["total_length"].tolist()
print("actor and critic take steps, and packed samples become experience")
"""

RECEIVE_BUFFER = """
import torch

wrap = load("openrlhf/trainer/ray/vllm_worker_wrap.py", "wrap")
alone()
loaded = {}


@stub("the sync group")
class Group:
    def broadcast(self, tensor, src, stream):
        tensor.fill_(3)


worker = wrap.WorkerWrap.__new__(wrap.WorkerWrap)
worker._model_update_with_ray, worker._model_update_group = False, Group()
worker.device = torch.device("cpu")
worker.model_config = types.SimpleNamespace(dtype=torch.bfloat16)
model = stub("the engine's model", load_weights=lambda weights: loaded.update(weights))
worker.model_runner = types.SimpleNamespace(model=model)
worker.update_weight("w", torch.bfloat16, (2, 3))
assert loaded["w"].shape == (2, 3) and bool((loaded["w"] == 3).all())
print("the engine loaded the received weight")
"""

BARRIER = """
helpers = load("openrlhf/utils/distributed_util.py", "helpers")
alone()
helpers.torch_dist_barrier_and_cuda_sync()
print("past the barrier")
"""


@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(
            STEP, marks=pytest.mark.patch("openrlhf/0.11.2/0003-put-tensors-on-the-accelerator"), id="0.11"
        ),
        pytest.param(
            STEP_FLAT,
            marks=pytest.mark.patch("openrlhf/0.5.1/0003-put-tensors-on-the-accelerator"),
            id="0.5",
        ),
    ],
)
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("cpu_only")
def test_trainers_are_on_the_configured_accelerator(proves, probe):
    proves(probe, NO_CUDA)


@pytest.mark.patch("openrlhf/0.5.1/0006-honour-the-sync-backend")
@pytest.mark.usefixtures("cpu_only")
def test_the_receive_buffer_is_on_the_configured_accelerator(proves):
    proves(RECEIVE_BUFFER, NO_CUDA)


@pytest.mark.patch("openrlhf/0.11.2/0004-synchronize-the-accelerator")
@pytest.mark.usefixtures("cpu_only")
def test_synchronizing_needs_no_gpu(proves):
    proves(BARRIER, NO_CUDA)
