"""Real Ray actors on machines with eight simulated GPUs: on which of them would each compute?

The variables of a process determine which GPUs it sees (`visible_devices.visible_gpus` of rlhf_stack), and
its device is the one that it would use of these. A ``rocm-smi`` or an ``amd-smi`` of these tests reports
AMD's GPUs, the latter also to Ray 2.55, which queries a library.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOSET_CUDA = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
NOSET_ROCR = "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES"
NOSET_HIP = "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES"
HERE = Path(__file__).parent
SECONDS = 300
REVERSED = "7,6,5,4,3,2,1,0"
RAY = importlib.metadata.version("ray").split("+")[0]
AMD_RAY = pytest.mark.skipif(
    RAY != "2.12.0", reason="of the releases here only Ray 2.12.0 has this AMD support"
)
NEW_RAY = pytest.mark.skipif(
    RAY in ("2.9.3", "2.12.0"), reason="the OpenRLHF of this cell uses no NOSET variable"
)

NODE = """
import ast
import importlib.metadata
import logging
import socket
import tempfile

import ray
from rlhf_stack.accelerator import visible_devices
from rlhf_stack.config import env_vars

KIND = os.environ[env_vars.ACCELERATOR]
TRAINERS = ("DistributedTorchRayActor", "BaseDistributedActor")
MARKS = ("_change_executed",)  # of scripts/patches/changes.py


def start(gpus):
    os.environ |= {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")
    own_ray(num_cpus=8, num_gpus=gpus, logging_level="ERROR", _temp_dir=folder)


def seen():
    return visible_devices.visible_gpus(os.environ, KIND, 8)


def taken(ordinal):
    return seen()[ordinal] if ordinal < len(seen()) else f"none: GPU {ordinal} of {len(seen())} visible"


def meant(gpu):
    below = {name: value for name, value in os.environ.items() if name == visible_devices.ROCR}
    named = visible_devices.visible_gpus(below | {visible_devices.CUDA: str(gpu)}, KIND, 8)
    return named[0] if named else f"none: {gpu}"


def trainer_class():
    # OpenRLHF's own class, without the models that its module imports; patched, it calls its hooks.
    release = importlib.metadata.version("openrlhf").split(".")[1]
    hooks = importlib.import_module(f"rlhf_stack.hooks.openrlhf_v0_{release}")
    folder = Path(importlib.util.find_spec("openrlhf").submodule_search_locations[0]) / "trainer" / "ray"
    names = {"os": os, "logging": logging, "socket": socket, "ray": ray, "hooks": hooks}
    if (folder / "utils.py").exists():
        names |= vars(load("openrlhf/trainer/ray/utils.py", "utils"))
    tree = ast.parse((folder / "launcher.py").read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in (*TRAINERS, *MARKS)]
    exec(compile(tree, "launcher", "exec"), names)
    return next(names[name] for name in TRAINERS if name in names)


@ray.remote(num_cpus=0)
class Trainer:
    def device(self):
        trainer = trainer_class()
        local = (0,) if trainer.__name__ == TRAINERS[0] else ()
        trainer(1, 0, *local, "127.0.0.1", 1)
        return meant(ray.get_gpu_ids()[0]), taken(int(os.environ["LOCAL_RANK"]))


@ray.remote(num_cpus=0)
class Own:
    def device(self):
        return meant(ray.get_gpu_ids()[0]), taken(0)


def check(title, found):
    right = [assigned for assigned, _ in found]
    assert [device for _, device in found] == right, f"{title}: (Ray's GPU, taken GPU): {found}"
    assert len(set(right)) == len(right), right
"""

RANKS = """
start(len(seen()))
half = len(seen()) // 2
trainers = [Trainer.options(num_gpus=1).remote() for _ in range(half)]
check("trainer ranks", ray.get([actor.device.remote() for actor in trainers]))
noset = [os.environ.get(f"RAY_EXPERIMENTAL_NOSET_{name}_VISIBLE_DEVICES") for name in ("CUDA", "HIP")]
if "1" not in noset:
    own = [Own.options(num_gpus=1).remote() for _ in range(half)]
    check("users' own actors", ray.get([actor.device.remote() for actor in own]))
print("trainer ranks and users' own actors compute on the GPUs that Ray assigned")
"""

ENGINES = """
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@stub("the worker of an engine")
class Worker:
    # vLLM's worker, without the parts that need a GPU.
    def __init__(self, local_rank, **_):
        self.local_rank = local_rank

    def init_device(self):
        pass

    def load_model(self):
        pass

    def device(self):
        return taken(self.local_rank)


@ray.remote(num_cpus=0)
class Engine:
    # vLLM's own executors.
    def __init__(self, size):
        import vllm.executor.gpu_executor as one
        import vllm.executor.ray_gpu_executor as several

        class Wrapper(several.RayWorkerWrapper):
            def init_worker(self, **arguments):
                self.worker = Worker(**arguments)

        replace(one, WorkerWrapperBase=Wrapper)
        replace(several, RayWorkerWrapper=Wrapper)
        executor = one.GPUExecutor if size == 1 else several.RayGPUExecutor
        self.executor = executor.__new__(executor)
        self.executor.parallel_config = types.SimpleNamespace(
            world_size=size,
            tensor_parallel_size=size,
            ray_workers_use_nsight=False,
            max_parallel_loading_workers=None,
        )
        self.executor.model_config = types.SimpleNamespace(trust_remote_code=False)
        replace(executor, _get_worker_kwargs=lambda _, local_rank=0, *__, **___: {"local_rank": local_rank})
        if size == 1:
            self.executor._init_non_spec_worker()
        else:
            self.executor._init_workers_ray(ray.util.get_current_placement_group())

    def devices(self):
        if ray.get_gpu_ids():
            return [(meant(ray.get_gpu_ids()[0]), self.executor.driver_worker.device())]
        ranks = [self.executor.driver_dummy_worker, *self.executor.workers]
        gpus = ray.get([rank.get_node_and_gpu_ids.remote() for rank in ranks])
        return [
            (meant(assigned[0]), device)
            for (_, assigned), device in zip(gpus, self.executor._run_workers("device"), strict=True)
        ]


start(len(seen()))
engines = [Engine.options(num_gpus=1).remote(1) for _ in range(2)]
for size in (2, 4):
    group = placement_group([{"GPU": 1, "CPU": 1}] * size)
    ray.get(group.ready(), timeout=60)
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_capture_child_tasks=True, placement_group_bundle_index=0
    )
    engines.append(Engine.options(num_gpus=0, scheduling_strategy=strategy).remote(size))
check("engine workers", sum(ray.get([engine.devices.remote() for engine in engines]), []))
print("engines with tensor parallelism 1, 2 and 4 compute on the GPUs that Ray assigned")
"""

ENGINE_OF_ONE_GPU = """
import ray
from openrlhf.trainer.ray import vllm_engine

replace(ray, get_gpu_ids=lambda: ["4"])
engine = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class
engine._configure_device_env(stub("an engine"), "uni", None, 1)
lists = {os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}
assert lists == {"4"}, f"the variables differ: {sorted(lists)}"
print("the engine sees GPU 4 by both variables")
"""

DETECTION = """
from ray._private.accelerators import AMDGPUAcceleratorManager as amd

found = amd.get_current_node_num_accelerators()
assert found == int(os.environ["EXPECTED"]), f"{found} GPUs were found"
product = amd.get_current_node_accelerator_type()
assert product == (os.environ.get("PRODUCT") or None), "the product is unknown"
assert not Path("evaluated").exists(), "what rocm-smi printed was evaluated"
print(found, "AMD GPUs")
"""

FOUND_BY_OLD_RAY = """
from ray._private.accelerators import NvidiaGPUAcceleratorManager as manager

found = manager.get_current_node_num_accelerators()
assert found == 8, f"{found} GPUs were found"
print(found, "GPUs")
"""

JOIN = """
import torch

replace(torch.version, hip="6.1")
from vllm.executor.ray_utils import initialize_ray_cluster

from ray.cluster_utils import Cluster

cluster = Cluster(True, head_node_args={"num_gpus": 2, "num_cpus": 1})
os.environ["RAY_ADDRESS"] = cluster.address
config = types.SimpleNamespace(world_size=2, placement_group=None)
initialize_ray_cluster(config)
assert config.placement_group.bundle_count == 2
ray.shutdown()
cluster.shutdown()
print("vLLM joined the cluster")
"""


@pytest.fixture
def machine(monkeypatch):
    """A function that makes this a machine for "rocm" or "cuda", with further variables."""

    def make(kind, smi="rocm", **variables):
        visible = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
        for name in (*visible, NOSET_CUDA, NOSET_ROCR, NOSET_HIP):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("RLHF_STACK_ACCELERATOR", kind)
        if kind == "rocm":
            monkeypatch.setenv("PATH", f"{HERE / smi}:{os.environ['PATH']}")
            monkeypatch.setenv("PYTHONPATH", str(HERE / smi), prepend=os.pathsep)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return make


@pytest.mark.patch(
    "ray/2.12.0/0001-assign-amd-gpus-by-cuda-visible-devices", "ray/2.9.3/0001-detect-and-assign-amd-gpus"
)
@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({NOSET_ROCR: "1"}, marks=AMD_RAY),
        {"HIP_VISIBLE_DEVICES": "6,4,1,3"},
        {"HIP_VISIBLE_DEVICES": "1,0,2,3", "ROCR_VISIBLE_DEVICES": "7,5,3,1"},
    ],
    ids=str,
)
def test_on_rocm_each_process_computes_on_the_gpu_that_ray_assigned(proves, machine, variables):
    machine("rocm", **variables)
    proves(f"{NODE}\n{RANKS}", "taken GPU|VisibleDevicesError")


@pytest.mark.patch("ray/2.12.0/0001-assign-amd-gpus-by-cuda-visible-devices")
def test_on_rocm_the_workers_of_an_engine_see_gpus(proves, machine):
    machine("rocm")
    proves(f"{NODE}\n{ENGINES}", "taken GPU|VisibleDevicesError")


@pytest.mark.patch("ray/2.12.0/0003-treat-noset-0-as-off", "ray/2.9.3/0002-treat-noset-0-as-off")
def test_0_in_a_noset_variable_is_off(proves, machine):
    machine("cuda", **{NOSET_CUDA: "0", "CUDA_VISIBLE_DEVICES": "6,4,1,3"})
    proves(f"{NODE}\n{RANKS}", "taken GPU")


@pytest.mark.patch("openrlhf/0.11.2/0030-set-local-rank-from-ray-gpu")
@pytest.mark.parametrize("noset", ["0", "1"])
def test_a_local_rank_is_an_index_and_not_a_gpu_id(proves, machine, noset):
    machine("cuda", **{NOSET_CUDA: noset, "CUDA_VISIBLE_DEVICES": "6,4,1,3"})
    proves(f"{NODE}\n{RANKS}", "none: GPU 6 of")


@pytest.mark.patch("openrlhf/0.11.2/0030-set-local-rank-from-ray-gpu")
@pytest.mark.parametrize("both", [False, True], ids=["HIP", "HIP and CUDA"])
def test_on_rocm_7_a_local_rank_is_an_index_and_not_a_gpu_id(proves, machine, both):
    """With the defaults of the cell: both NOSET variables."""
    lists = dict.fromkeys(("HIP_VISIBLE_DEVICES", *["CUDA_VISIBLE_DEVICES"] * both), "6,4,1,3")
    machine("rocm", "amd_smi", **lists, **{NOSET_HIP: "1", NOSET_ROCR: "1"})
    proves(f"{NODE}\n{RANKS}", "none: GPU 6 of")


@pytest.mark.patch("openrlhf/0.11.2/0030-set-local-rank-from-ray-gpu")
def test_on_rocm_7_an_engine_sees_its_gpu_by_both_variables(proves, machine):
    """On a node that HIP_VISIBLE_DEVICES restricts; vLLM compares them."""
    machine("rocm", "amd_smi", **{"HIP_VISIBLE_DEVICES": "4,5", NOSET_HIP: "1", NOSET_ROCR: "1"})
    proves(ENGINE_OF_ONE_GPU, "the variables differ")


@NEW_RAY
def test_on_rocm_7_ray_may_restrict_one_of_two_variables(machine):
    """Ray's own manager then refuses the difference that it made."""
    lists = dict.fromkeys(("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), "6,4,1,3")
    machine("rocm", "amd_smi", **lists)
    probe = "\n".join([(HERE / "preamble.py").read_text(encoding="utf-8"), NODE, RANKS])
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.patch("openrlhf/0.5.1/0010-set-local-rank-from-ray-gpu")
@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_a_local_rank_is_the_index_of_the_gpu_of_ray(proves, machine, kind):
    machine(kind, **{NOSET_CUDA: "1", NOSET_ROCR: "1", "CUDA_VISIBLE_DEVICES": "6,4,1,3"})
    proves(f"{NODE}\n{RANKS}", "trainer ranks: .*taken GPU")


@pytest.mark.patch("vllm/0.4.2/0002-use-assigned-gpu-in-one-gpu-engines")
@pytest.mark.parametrize(
    ("kind", "variables"),
    [
        ("cuda", {"CUDA_VISIBLE_DEVICES": REVERSED, NOSET_CUDA: "1"}),
        pytest.param(
            "rocm", {"ROCR_VISIBLE_DEVICES": REVERSED, NOSET_CUDA: "1", NOSET_ROCR: "1"}, marks=AMD_RAY
        ),
    ],
    ids=str,
)
def test_an_engine_of_one_gpu_computes_on_the_gpu_that_ray_assigned(proves, machine, kind, variables):
    machine(kind, **variables)
    proves(f"{NODE}\n{ENGINES}", "engine workers: .*taken GPU")


@pytest.mark.patch("vllm/0.4.2/0003-use-assigned-gpus-in-engine-workers")
@pytest.mark.parametrize(
    ("kind", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("rocm", "HIP_VISIBLE_DEVICES")]
)
def test_the_workers_of_an_engine_compute_on_the_gpus_that_ray_assigned(proves, machine, kind, variable):
    machine(kind, **{variable: REVERSED})
    proves(f"{NODE}\n{ENGINES}", "engine workers: .*taken GPU|VisibleDevicesError")


@pytest.mark.patch("ray/2.12.0/0002-parse-any-rocm-smi-output")
@pytest.mark.parametrize(
    ("prints", "expected"),
    [
        ("WARNING: low power\n\ndevice,Name\ncard0,MI300X\ncard1,MI300X\n", "2"),
        ("ERROR: no driver\nsee dmesg\nor ask", "0"),
        ("open('evaluated', 'w')", "0"),
    ],
    ids=["warnings around", "no driver", "code"],
)
def test_only_the_cards_that_rocm_smi_lists_are_gpus(proves, machine, prints, expected):
    machine("rocm", RLHF_TEST_SMI=prints, EXPECTED=expected)
    proves(DETECTION, "GPUs were found|was evaluated")


@pytest.mark.patch("ray/2.12.0/0002-parse-any-rocm-smi-output")
def test_the_product_is_known_as_rocm_6_prints_it(proves, machine):
    machine("rocm", EXPECTED="8", PRODUCT="AMD-Instinct-MI300X-OAM")
    proves(DETECTION, "the product is unknown")


@pytest.mark.patch("ray/2.9.3/0001-detect-and-assign-amd-gpus")
def test_ray_2_9_3_finds_amd_gpus(proves, machine):
    machine("rocm")
    proves(FOUND_BY_OLD_RAY, "0 GPUs were found")


@pytest.mark.patch("vllm/0.4.2/0004-join-running-ray-on-rocm")
def test_vllm_joins_a_running_cluster_on_rocm(proves, machine):
    machine("rocm")
    proves(f"{NODE}\n{JOIN}", "num_cpus and num_gpus must not be provided")
