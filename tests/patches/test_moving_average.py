"""The moving average of the weights, which OpenRLHF saves instead of the trained model."""

import pytest

AVERAGES = """
import torch

on_cpu()
alone()
import deepspeed

BETA, UPDATES, ACCUMULATED = 0.992, 500, 2
INITIAL, TRAINED, ROUNDING = 1.0, 1.1015625, 2**-8  # numbers of bf16; the error of another between them
EXPECTED = INITIAL + (TRAINED - INITIAL) * (1 - BETA**UPDATES)


def whole(model):
    # The weights as OpenRLHF saves them.
    for weight in model.parameters():
        with deepspeed.zero.GatheredParameters([weight], enabled=hasattr(weight, "ds_id")):
            yield weight.data.float()


def fill(model, value):
    for weight in model.parameters():
        with deepspeed.zero.GatheredParameters([weight], 0, enabled=hasattr(weight, "ds_id")):
            weight.data.fill_(value)


def averaged(model, average, stage):
    # Return what is saved after training moved the model away from its initial weights.
    strategy = DeepspeedStrategy.__new__(DeepspeedStrategy)
    vars(strategy).update(
        stage=stage, time_steps={"ema": 0}, accumulated_gradient=ACCUMULATED, use_dynamic_batch=False
    )
    fill(model, TRAINED)
    for _ in range(ACCUMULATED * UPDATES):
        strategy.moving_average(model, average, BETA, "cpu")
    return list(whole(average))
"""

SECTIONS = """
from openrlhf.utils.deepspeed import deepspeed_utils
from openrlhf.utils.deepspeed.deepspeed import DeepspeedStrategy
"""

FLAT = """
from openrlhf.utils import deepspeed_utils
from openrlhf.utils.deepspeed import DeepspeedStrategy
"""

PLAIN = """
model, average = (torch.nn.Linear(8, 4).to(torch.bfloat16) for _ in range(2))
fill(average, INITIAL)
for weight in averaged(model, average, stage=2):
    lack = (weight - EXPECTED).abs().max().item()
    assert lack <= ROUNDING, f"the average lost small changes: it is {lack:.3f} from the exact one"
print("the average has small changes too")
"""

SHARDED = """
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
deepspeed.init_distributed("gloo")


class Model(torch.nn.Module):
    # A weight that two layers share, and a small one.
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(512, 512)
        self.second = torch.nn.Linear(512, 512, bias=False)
        self.second.weight = self.first.weight


def prepared(config):
    config |= {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 1}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Model()
    fill(model, INITIAL)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


model = prepared(deepspeed_utils.get_train_ds_config(offload=False, adam_offload=False, stage=3, zpg=1))
average = prepared(deepspeed_utils.get_eval_ds_config(offload=True, stage=3))
for engine in (model, average):
    engine.module.first.bias.all_gather()  # DeepSpeed may keep a small weight gathered
for weight in averaged(model, average, stage=3):
    lack = (weight - EXPECTED).abs().max().item()
    assert lack <= ROUNDING, f"the saved average is not that of training: {lack:.3f} from the exact one"
print("the saved average is that of the trained weights")
"""

RELEASES = [
    pytest.param(
        SECTIONS, marks=pytest.mark.patch("openrlhf/0.11.2/0070-average-weights-in-32-bits"), id="0.11"
    ),
    pytest.param(FLAT, marks=pytest.mark.patch("openrlhf/0.5.1/0044-average-weights-in-32-bits"), id="0.5"),
]


@pytest.mark.parametrize("release", RELEASES)
def test_a_moving_average_has_small_changes_too(proves, release):
    proves(AVERAGES + release + PLAIN, "the average lost small changes: it is 0.1")


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize("release", RELEASES)
def test_a_moving_average_at_zero3_is_saved(proves, release):
    proves(AVERAGES + release + SHARDED, "the saved average is not that of training: 0.1")
