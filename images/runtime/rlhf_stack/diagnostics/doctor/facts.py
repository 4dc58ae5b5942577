"""What is known of a node and of a cluster, in plain values, which travel between nodes and to JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SECRET = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "KEY", "CREDENTIAL")
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
TOLD = "RLHF_STACK_TOLD"  # what the entrypoint has said already
NAMES = ("HIP_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")


@dataclass(frozen=True)
class Library:
    """An NCCL or RCCL: who loads it, its version, and the id of its build ("" if the linker gave none)."""

    user: str
    path: str
    version: str
    build_id: str


@dataclass(frozen=True)
class Disk:
    """The file system that holds ``path``; bytes."""

    path: str
    total: int
    free: int


@dataclass(frozen=True)
class Started:
    """A process of Ray and the variables that it was started with, of those that matter."""

    role: str
    pid: int
    name: str
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU, as the driver tells; ``alive`` if it is to be seen here."""

    pid: int
    megabytes: int
    name: str
    alive: bool


@dataclass(frozen=True)
class Patch:
    """A patch of this distribution: ``name`` without its number, ``state`` as `rlhf_stack.diagnostics.installed_patches` says."""

    package: str
    name: str
    state: str
    why: str


@dataclass(frozen=True)
class Node:
    """One node as it was found. Bytes and seconds; None and "" where there is nothing, or it is not told."""

    host: str
    accelerator: str | None
    versions: Mapping[str, str]
    patches: tuple[Patch, ...]
    variables: Mapping[str, str]
    started: tuple[Started, ...]
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
    left_locks: tuple[str, ...]
    left_processes: tuple[str, ...]
    gpu_processes: tuple[GpuProcess, ...]


@dataclass(frozen=True)
class Answer:
    """What a node of the cluster said; its clock is ``ahead`` of ours by so much, give or take ``within``."""

    address: str
    node: Node | None
    ahead: float = 0.0
    within: float = 0.0


def matters(name: str) -> bool:
    """Whether a variable decides how a run goes, and may be shown."""
    if any(word in name.upper().split("_") for word in SECRET):
        return False
    return name != TOLD and (name in NAMES or name.startswith(PREFIXES))


def of_interest(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of ``variables`` that matter, by name."""
    return {name: variables[name] for name in sorted(variables) if matters(name)}
