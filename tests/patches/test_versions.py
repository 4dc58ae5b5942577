import pytest

PROBE = """
@stub("vLLM")
class LLM:
    def __init__(self, *_, **__):
        from vllm.worker.cpu_worker import CPUWorker

        self.worker = CPUWorker
        loop = {"stop_remote_worker_execution_loop": lambda: stopped.append(True)}
        self.llm_engine = types.SimpleNamespace(model_executor=types.SimpleNamespace(**loop))


import vllm
from openrlhf.trainer.ray.vllm_engine import LLMRayActor

replace(vllm, LLM=LLM)
Actor = LLMRayActor.__ray_metadata__.modified_class
replace(vllm, __version__="0.10.0")
stopped = []
for size in (1, 2):
    Actor("model", tensor_parallel_size=size).stop_remote_worker_execution_loop()
assert len(stopped) == 2, "0.10.0 is newer than 0.4.2, whose workers have no loop to stop"
print("0.10.0 is newer than 0.4.1 and 0.4.2")
"""


@pytest.mark.patch("openrlhf/0.5.1/0005-compare-versions")
def test_versions_of_vllm_are_not_compared_as_text(proves):
    proves(PROBE, r"OpenRLHF only supports vLLM >= 0.4.1")
