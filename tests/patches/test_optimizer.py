import pytest

# As in an image whose operators could not be compiled, after a process that compiled one there was killed.
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

installed_ops.update(dict.fromkeys(installed_ops, False))


def waited(*_):
    raise TimeoutError("still waiting for the lock of a process that is not there")


signal.signal(signal.SIGALRM, waited)
"""

TRAINED = """
signal.alarm(30)
alone()
os.environ.update({"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"})
deepspeed.init_distributed("gloo")
helpers = load("openrlhf/utils/deepspeed/deepspeed_utils.py", "helpers")
adam = {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
config = helpers.get_train_ds_config(
    offload=False, adam_offload=OFFLOAD, stage=0, param_dtype="fp32", zpg=1, optim_config=adam
)
model = torch.nn.Linear(2, 1)
before = [parameter.detach().clone() for parameter in model.parameters()]
engine, *_ = deepspeed.initialize(model=model, config=config | {"train_micro_batch_size_per_gpu": 1})
engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()
signal.alarm(0)
assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters()))
print("trained a step with", type(engine.optimizer).__name__)
"""

REFUSED = """
signal.alarm(30)
helpers = load("openrlhf/utils/deepspeed/deepspeed_utils.py", "helpers")
adam = {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
try:
    helpers.get_train_ds_config(offload=False, adam_offload=True, optim_config=adam)
except RuntimeError as error:
    assert "DeepSpeed's cpu_adam is not compiled in this image" in str(error), error
    print(error)
else:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(2))])
"""
HANGS = "TimeoutError: still waiting for the lock of a process that is not there"


@pytest.mark.usefixtures("cpu_only")
def test_without_its_operator_the_optimizer_is_torch_s_and_nothing_waits_for_the_dead(proves):
    proves(NOT_COMPILED + TRAINED.replace("OFFLOAD", "False"), HANGS)


@pytest.mark.usefixtures("cpu_only")
def test_an_offloaded_optimizer_without_its_operator_is_an_error_that_names_it(proves):
    proves(NOT_COMPILED + REFUSED, HANGS)
