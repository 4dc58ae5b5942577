import pytest

PROBE = """
@stub("vLLM")
class LLM:
    def __init__(self, *_, **__):
        from vllm.worker.cpu_worker import CPUWorker

        self.worker = CPUWorker


import vllm
from openrlhf.trainer.ray.vllm_engine import LLMRayActor

replace(vllm, LLM=LLM)
Actor = LLMRayActor.__ray_metadata__.modified_class
worker = Actor("model", tensor_parallel_size=1).llm.worker
absent = [name for name in ("init_process_group", "update_weight") if not hasattr(worker, name)]
assert not absent, f"the worker of a CPU engine has no {absent}"
print("the worker of a CPU engine takes weights")
"""


@pytest.mark.patch("openrlhf/0.5.1/0004-use-accelerator-worker-class")
@pytest.mark.usefixtures("cpu_only")
def test_the_worker_of_a_cpu_engine_takes_weights(proves):
    proves(PROBE, r"the worker of a CPU engine has no \['init_process_group', 'update_weight'\]")
