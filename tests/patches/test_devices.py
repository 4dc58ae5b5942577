import pytest

# By the torch of the cell: built for CPUs, or for CUDA.
NO_CUDA = "Torch not compiled with CUDA enabled|Found no NVIDIA driver on your system"

REPLAY_BUFFER = """
from openrlhf.trainer.ppo_utils.replay_buffer import NaiveReplayBuffer

buffer = NaiveReplayBuffer(4)
assert buffer.target_device.type == "cpu", buffer.target_device
print("the replay buffer's device is", buffer.target_device)
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


TENSORS = (
    "openrlhf/0.11.2/0003-put-tensors-on-the-accelerator",
    "openrlhf/0.5.1/0003-put-tensors-on-the-accelerator",
)


@pytest.mark.patch(*TENSORS)
@pytest.mark.usefixtures("cpu_only")
def test_the_replay_buffer_is_on_the_configured_accelerator(proves):
    proves(REPLAY_BUFFER, NO_CUDA)


@pytest.mark.patch("openrlhf/0.5.1/0006-honour-the-sync-backend")
@pytest.mark.usefixtures("cpu_only")
def test_the_receive_buffer_is_on_the_configured_accelerator(proves):
    proves(RECEIVE_BUFFER, NO_CUDA)


@pytest.mark.patch("openrlhf/0.11.2/0004-synchronize-the-accelerator")
@pytest.mark.usefixtures("cpu_only")
def test_synchronizing_needs_no_gpu(proves):
    proves(BARRIER, NO_CUDA)
