import pytest

PROBE = """
import ray
import torch
from torch.multiprocessing.reductions import reduce_tensor

replace_module("openrlhf.trainer.ray")
gpus = load("openrlhf/trainer/ray/utils.py", "openrlhf.trainer.ray.utils")
wrap = load("openrlhf/trainer/ray/vllm_worker_wrap.py", "wrap")


class Rank:
    def gpu(self):
        gpus = load("openrlhf/trainer/ray/utils.py", "openrlhf.trainer.ray.utils")
        return gpus.get_physical_gpu_id()

    def load(self, handles):
        replace_module("openrlhf.trainer.ray")
        load("openrlhf/trainer/ray/utils.py", "openrlhf.trainer.ray.utils")
        wrap = load("openrlhf/trainer/ray/vllm_worker_wrap.py", "wrap")
        alone()
        loaded = {}
        worker = wrap.WorkerWrap()
        worker.device = torch.device("cpu")
        worker.model_config = types.SimpleNamespace(dtype=torch.bfloat16)
        model = stub("the engine's model", load_weights=lambda weights: loaded.update(weights))
        worker.model_runner = types.SimpleNamespace(model=model)
        worker.update_weight_cuda_ipc("w", torch.bfloat16, (2, 3), handles)
        return float(loaded["w"].sum())


own_ray(num_cpus=3, num_gpus=2)
shared = [ray.remote(Rank).options(num_gpus=0.5, num_cpus=0).remote() for _ in range(2)]
ids = ray.get([rank.gpu.remote() for rank in shared])
other = ray.get(ray.remote(Rank).options(num_gpus=1, num_cpus=0).remote().gpu.remote())
assert ids[0] == ids[1] != other, (ids, other)
weight = torch.full((2, 3), 2, dtype=torch.bfloat16)
assert ray.get(shared[1].load.remote({ids[0]: reduce_tensor(weight), other: None})) == 12
ray.shutdown()
print("trainer and engine identify the shared GPU, and the weight was loaded")
"""


@pytest.mark.patch("openrlhf/0.11.2/0006-identify-the-shared-gpu")
@pytest.mark.usefixtures("cpu_only")
def test_a_shared_gpu_has_one_name_and_its_handle_opens(proves):
    proves(PROBE, "Torch not compiled with CUDA enabled")
