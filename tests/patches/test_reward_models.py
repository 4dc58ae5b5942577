"""Reward models and critics: how they are loaded, served and saved."""

import pytest

MODEL = """
import torch
from rlhf_stack.demo import tiny_model

on_cpu()
from openrlhf.models import get_llm_for_sequence_regression

folder = Path("model")
tiny_model.make_model(folder, seed=0, layers=2, heads=4)
config = json.loads((folder / "config.json").read_text())
(folder / "config.json").write_text(json.dumps(config | {"mean": 3.25, "std": 2.5}))
tokens, mask = torch.arange(3, 11).view(2, 4), torch.tensor([[1] * 4, [1] * 3 + [0]])
"""
NORMALIZED = (
    MODEL
    + """
for kind in ("reward", "critic"):
    model = get_llm_for_sequence_regression(str(folder), kind, normalize_reward=True)
    found = model.mean.item(), model.std.item()
    assert found == (3.25, 2.5), f"the {kind} is normalized by {found}"
print("rewards and values are normalized by the configuration")
"""
)
SERVED = (
    MODEL
    + """
model = get_llm_for_sequence_regression(str(folder), "reward", normalize_reward=True, init_value_head=True)
real = torch.Tensor.gather


def gather(values, dim, index):
    assert index.device == values.device, f"values on {values.device}, their index on {index.device}"
    return real(values, dim=dim, index=index)


replace(torch.Tensor, gather=gather)  # torch does not compare the devices of "meta" there
head = getattr(model, model.value_head_prefix)
head.register_forward_hook(lambda *given: given[-1].to("meta"))  # as on another GPU
assert model.eval()(tokens, mask).shape == (2,)
print("a reward model whose head is on another device answers")
"""
)
HEAD = (
    MODEL
    + """
from peft import PeftModel

options = {"lora_rank": 4, "target_modules": "all-linear", "init_value_head": True}
trained = get_llm_for_sequence_regression(str(folder), "reward", **options).float()
places = [f"{trained.value_head_prefix}.{inner}" for inner in ("base_layer", "modules_to_save")]
[head] = [value for name, value in trained.named_parameters() if any(place in name for place in places)]
assert head.requires_grad, "the weights of the head are not trained"
torch.nn.init.normal_(head)
trained.save_pretrained("adapter")
loaded = get_llm_for_sequence_regression(str(folder), "reward").float()
loaded = PeftModel.from_pretrained(loaded, "adapter")
rewards = [model.eval()(tokens, mask) for model in (trained, loaded)]
torch.testing.assert_close(*rewards)
print("the head of a reward model with LoRA is trained, saved and loaded")
"""
)
COMBINED = (
    HEAD
    + """
from openrlhf.cli import lora_combiner

lora_combiner.apply_lora(str(folder), "adapter", "combined", True, "bf16")
combined = get_llm_for_sequence_regression("combined", "reward").float()
torch.testing.assert_close(combined.eval()(tokens, mask), rewards[0], rtol=0.05, atol=0.05)
try:
    get_llm_for_sequence_regression(
        str(folder), "reward", **options, ds_config={"zero_optimization": {"stage": 3}}
    )
except ValueError as error:
    assert "use --ds.zero_stage 2" in str(error)
else:
    raise AssertionError("at ZeRO stage 3 the head would not be saved")
print("lora_combiner keeps the head")
"""
)


@pytest.mark.patch("openrlhf/0.11.2/0063-normalize-rewards-by-the-configuration")
def test_rewards_are_normalized_by_the_models_configuration(proves):
    proves(NORMALIZED, r"the (reward|critic) is normalized by")


@pytest.mark.patch(
    "openrlhf/0.11.2/0064-serve-rewards-of-several-gpus", "openrlhf/0.5.1/0040-serve-rewards-of-several-gpus"
)
def test_a_reward_model_on_several_gpus_answers(proves):
    proves(SERVED, "their index on cpu")


@pytest.mark.patch("openrlhf/0.11.2/0065-train-the-head-with-lora")
def test_lora_combiner_keeps_the_head(proves):
    proves(COMBINED, "the weights of the head are not trained")


@pytest.mark.patch("openrlhf/0.5.1/0041-train-the-head-with-lora")
def test_the_head_of_a_reward_model_with_lora_is_trained_and_saved(proves):
    proves(HEAD, "the weights of the head are not trained")
