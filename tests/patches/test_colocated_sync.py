import pytest

PROBE = """
import subprocess

import ray

CHILD = "from rlhf_stack.accelerator import devices; print(devices.physical_gpu_id())"


class Trainer:
    def gpu(self):
        from rlhf_stack.accelerator import devices

        return devices.physical_gpu_id()


class Engine:
    def worker_gpu(self):
        from openrlhf.trainer.ray import vllm_engine

        actor = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class
        actor._configure_device_env(actor, "uni", None, 0.2)
        child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
        return child.stdout.strip() or child.stderr[-200:]


own_ray(num_cpus=3, num_gpus=2)
shared = {"num_gpus": 0.5, "num_cpus": 0}
kinds = ray.remote(Trainer), ray.remote(Engine)
trainer, engine = (kind.options(**shared).remote() for kind in kinds)
gpu, worker = ray.get(trainer.gpu.remote()), ray.get(engine.worker_gpu.remote())
other = ray.get(ray.remote(Trainer).options(num_gpus=1, num_cpus=0).remote().gpu.remote())
ray.shutdown()
assert gpu == worker != other, f"trainer {gpu}, worker {worker}"
print("a worker that is a child process of its engine identifies the GPU that it shares with the trainer")
"""


@pytest.mark.patch("openrlhf/0.11.2/0006-identify-the-shared-gpu")
@pytest.mark.usefixtures("cpu_only")
def test_a_worker_identifies_the_gpu_of_its_engine(proves):
    proves(PROBE, "AssertionError: trainer")
