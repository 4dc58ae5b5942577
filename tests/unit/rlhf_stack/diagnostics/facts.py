"""Facts of a node with eight GPUs, for tests of doctor's checks."""

from rlhf_stack.diagnostics.doctor.facts import NodeFacts

GIB = 1 << 30
GPU_NODE = NodeFacts(
    host="a",
    accelerator="cuda",
    versions={"ray": "2.55.0"},
    patches=(),
    variables={},
    ray_processes=(),
    resources={"GPU": 8.0},
    gpus=8,
    driver="580.95.05",
    built_for="cuda 13.0",
    libraries=(),
    missing_library="",
    shm_total=2 * GIB,
    shm_free=GIB,
    open_files=1 << 20,
    interfaces=("lo", "eth0"),
    resolves_to="10.0.0.2",
    taken_ports=(),
    disks=(),
    stale_locks=(),
    stale_processes=(),
    gpu_processes=(),
)
