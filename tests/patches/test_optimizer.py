import pytest

# As in an image that cannot compile operators, after a process was killed while it compiled one.
NOT_COMPILED = """
import signal

os.environ["CXX"] = "no-such-compiler"
os.environ["TORCH_EXTENSIONS_DIR"] = str(Path("extensions").absolute())
Path("extensions/fused_adam").mkdir(parents=True)
Path("extensions/fused_adam/lock").touch()
Path("extensions/cpu_adam").mkdir()
Path("extensions/cpu_adam/lock").touch()
import deepspeed
import torch
from deepspeed.git_version_info import installed_ops

installed_ops.update(fused_adam=False, cpu_adam=False)
note_stub("deepspeed.git_version_info.installed_ops")


def waited(*_):
    raise TimeoutError("still waiting for the lock of a dead process")


signal.signal(signal.SIGALRM, waited)
"""

# OpenRLHF 0.11 lets DeepSpeed create the optimizer from its config.
CONFIGURED = """
alone()
os.environ.update({"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"})
deepspeed.init_distributed("gloo")
helpers = load("openrlhf/utils/deepspeed/deepspeed_utils.py", "helpers")
adam = {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}


def step(model, offload):
    config = helpers.get_train_ds_config(
        offload=False, adam_offload=offload, stage=0, param_dtype="fp32", zpg=1, optim_config=adam
    )
    engine, *_ = deepspeed.initialize(model=model, config=config | {"train_micro_batch_size_per_gpu": 1})
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
"""

# OpenRLHF 0.5 creates it itself.
MADE = """
from openrlhf.utils.deepspeed import DeepspeedStrategy

strategy = DeepspeedStrategy.__new__(DeepspeedStrategy)


def step(model, offload):
    strategy.adam_offload = offload
    optimizer = strategy.create_optimizer(model, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""

TRAINS = """
model = torch.nn.Linear(2, 1)
signal.alarm(30)
before = [parameter.detach().clone() for parameter in model.parameters()]
step(model, offload=False)
assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters()))
print("trained a step with torch's AdamW")
"""

REFUSES = """
signal.alarm(30)
try:
    step(torch.nn.Linear(2, 1), offload=True)
except RuntimeError as error:
    assert "DeepSpeed's cpu_adam is not in this image and cannot be compiled" in str(error), error
    print(error)
else:
    raise AssertionError("a missing operator must be an error")
"""
HANGS = "TimeoutError: still waiting for the lock of a dead process"
RELEASES = [
    pytest.param(
        CONFIGURED, marks=pytest.mark.patch("openrlhf/0.11.2/0040-check-optimizer-operators"), id="0.11"
    ),
    pytest.param(MADE, marks=pytest.mark.patch("openrlhf/0.5.1/0011-check-optimizer-operators"), id="0.5"),
]


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize("release", RELEASES)
def test_without_the_operator_torchs_optimizer_is_used_and_a_stale_lock_is_removed(proves, release):
    proves(NOT_COMPILED + release + TRAINS, HANGS)


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize("release", RELEASES)
def test_an_offloaded_optimizer_without_its_operator_is_an_error_that_names_the_operator(proves, release):
    proves(NOT_COMPILED + release + REFUSES, HANGS)
