"""An engine detects collectives of a rank on its GPU; tests/cluster has the same with a real engine."""

import pytest

PROBE = """
import atexit
import subprocess
import threading
from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.engine import gpu_contention

on_cpu()
from openrlhf.trainer.ray import launcher

os.environ |= {env_vars.CHECK_COTENANCY: "1", devices.GPU_ID: os.getcwd()}
dist = importlib.import_module("torch.distributed")
store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
# The other rank joins the group, and enters the barrier after a line on its stdin.
OTHER = (
    "import sys, torch.distributed as dist",
    "store = dist.TCPStore('127.0.0.1', int(sys.argv[1]), 2, False)",
    "dist.init_process_group('gloo', store=store, rank=1, world_size=2)",
    "sys.stdin.readline()",
    "dist.barrier()",
)
other = subprocess.Popen([sys.executable, "-c", "; ".join(OTHER), str(store.port)], stdin=subprocess.PIPE)
atexit.register(other.kill)


@stub("the strategy's process group")
class Strategy:
    def setup_distributed(self):
        dist.init_process_group("gloo", store=store, rank=0, world_size=2)


launcher.BaseModelActor._setup_distributed(types.SimpleNamespace(_rank=0), Strategy())
engine = gpu_contention.ContentionCheck()
engine.check()
waiting = threading.Thread(target=dist.barrier)
waiting.start()
try:
    waiting.join(2)
    engine.check()
    detected = ""
except gpu_contention.GpuContentionError as error:
    detected = str(error)
other.communicate(b"go", timeout=60)
waiting.join(60)
assert "barrier of rank 0" in detected, "an engine generates while a rank waits in a barrier, undetected"
print("an engine that generates while a rank waits in a barrier is detected")
"""


@pytest.mark.patch("openrlhf/0.11.2/0036-detect-gpu-contention")
@pytest.mark.timeout(400)
def test_an_engine_detects_a_barrier_on_its_gpu(proves):
    proves(PROBE, "a rank waits in a barrier, undetected")
