"""The facts of a node, as plain values that can be sent between nodes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhf_stack.config.secret_names import is_secret, without_passwords
from rlhf_stack.diagnostics.network_adapters import RdmaAdapter

PREFIXES = (
    "CUDA_",
    "DS_",
    "GLOO_",
    "HF_",
    "HIP_",
    "HSA_",
    "NCCL_",
    "NVIDIA_",
    "PYTORCH_",
    "RAY_EXPERIMENTAL_NOSET_",
    "RCCL_",
    "RLHF_STACK_",
    "ROCR_",
    "TORCH_",
    "TRITON_",
    "VLLM_",
)
REPORTED = "RLHF_STACK_TOLD"  # warnings that the entrypoint has already printed
NAMES = ("HIP_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")


@dataclass(frozen=True)
class Library:
    """An NCCL or RCCL: its user (trainer or engine), version, and ELF build id ("" if it has none)."""

    user: str
    path: str
    version: str
    build_id: str


@dataclass(frozen=True)
class Disk:
    """The file system of ``path``; sizes in bytes."""

    path: str
    total: int
    free: int


# Variables that Ray sets for each process, also for a task without GPUs.
OF_ONE_PROCESS = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
)


@dataclass(frozen=True)
class RayProcess:
    """A process of Ray, with the relevant variables of its environment."""

    role: str
    pid: int
    name: str
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses GPU memory according to the driver; ``alive``: it is visible in this container."""

    pid: int
    megabytes: int
    name: str
    alive: bool


@dataclass(frozen=True)
class Patch:
    """A patch of this distribution: ``name`` without number, ``state`` and ``why`` as in `PatchStatus`."""

    package: str
    name: str
    state: str
    why: str


@dataclass(frozen=True)
class Rdma:
    """The RDMA adapters of a node, and what NCCL needs to use them.

    ``verbs``: the number of adapters that libibverbs lists, None if it cannot be loaded, ``verbs_error`` why.
    ``net_plugin``: the network plugin that NCCL loads, collected on a node with EFA. ``memlock``: the limit
    of locked memory in bytes, -1 if unlimited. ``peer_memory``: nvidia_peermem is loaded. ``open_driver``:
    NVIDIA's kernel modules are the open ones. ``kernel``: the release of Linux.
    """

    adapters: tuple[RdmaAdapter, ...] = ()
    verbs: int | None = None
    verbs_error: str = ""
    net_plugin: str = ""
    memlock: int = -1
    peer_memory: bool = False
    open_driver: bool = False
    kernel: str = ""


@dataclass(frozen=True)
class GpuHealth:
    """The health of a GPU as nvidia-smi reports it; "" and None if it reports none.

    ``bus``: its PCI address. ``uncorrected``: ECC errors since the driver was loaded. ``remap_pending``:
    faulty memory is replaced at the next reset. ``slowdowns``: why its clocks are reduced, if by a fault.
    ``recovery``: the action that the driver requests. ``fabric``: the state of its NVSwitch fabric.
    """

    index: int
    bus: str
    name: str
    uncorrected: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    slowdowns: tuple[str, ...] = ()
    recovery: str = ""
    fabric: str = ""


@dataclass(frozen=True)
class GpuReport:
    """The health of the NVIDIA GPUs of a node, or why it is ``unavailable``.

    ``nvlinks``: active links by GPU. ``xids``: faults in the kernel's log, or why that is unavailable.
    """

    gpus: tuple[GpuHealth, ...] = ()
    unavailable: str = "not collected"
    nvlinks: tuple[int, ...] = ()
    xids: tuple[str, ...] = ()
    xids_unavailable: str = ""


@dataclass(frozen=True)
class NodeFacts:
    """The facts of one node. Sizes in bytes; None and "" if absent or unknown."""

    host: str
    accelerator: str | None
    versions: Mapping[str, str]
    patches: tuple[Patch, ...]
    variables: Mapping[str, str]
    ray_processes: tuple[RayProcess, ...]
    resources: Mapping[str, float]
    gpus: int
    driver: str
    built_for: str
    libraries: tuple[Library, ...]
    missing_library: str
    shm_total: int
    shm_free: int
    open_files: int
    interfaces: tuple[str, ...]
    resolves_to: str
    taken_ports: tuple[int, ...]
    disks: tuple[Disk, ...]
    stale_locks: tuple[str, ...]
    stale_processes: tuple[str, ...]
    gpu_processes: tuple[GpuProcess, ...]
    rdma: Rdma = field(default_factory=Rdma)
    gpu_report: GpuReport = field(default_factory=GpuReport)
    attention: str = ""
    expected_missing: bool = False  # ``missing_library`` is the default of a stand-in, which lacks it
    gpu_models: tuple[str, ...] = ()
    inputs: str = ""  # the digest of the image's inputs


@dataclass(frozen=True)
class NodeAnswer:
    """The facts of a node, None if it did not respond; its clock is ``clock_offset`` s ahead of ours.

    The offset is measured with an error of at most ``clock_error`` s.
    """

    address: str
    node: NodeFacts | None
    clock_offset: float = 0.0
    clock_error: float = 0.0


@dataclass(frozen=True)
class LostNode:
    """A dead node whose address no live node has; why and when (s since 1970) it ended, if Ray knows."""

    address: str
    reason: str = ""
    ended: float | None = None


def is_relevant(name: str) -> bool:
    """Whether a variable affects a run and is not a secret."""
    if is_secret(name):
        return False
    return name != REPORTED and (name in NAMES or name.startswith(PREFIXES))


def relevant_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The relevant variables among ``variables``, sorted by name, without passwords in URLs."""
    return without_passwords({name: variables[name] for name in sorted(variables) if is_relevant(name)})
