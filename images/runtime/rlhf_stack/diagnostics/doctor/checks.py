"""The checks of one node: pure functions from its facts to findings, one of severity "ok" if they pass."""

import re
from collections.abc import Callable, Iterator

from rlhf_stack import known_bad
from rlhf_stack.accelerator import visible_devices
from rlhf_stack.diagnostics import host_check, installed_patches
from rlhf_stack.diagnostics.doctor.facts import NodeFacts
from rlhf_stack.diagnostics.doctor.gpu_health import check_gpu_health
from rlhf_stack.diagnostics.doctor.rdma import check_rdma
from rlhf_stack.known_bad.finding import ERROR, NOTE, OK, WARNING, Finding

GB = 10**9
MIN_SHM = 1 << 30
MIN_FREE_SHM = 128 << 20
MIN_FILES, ENOUGH_FILES = 4096, 65536
FULL_DISK, MIN_DISK = 0.95, 10 * GB
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
VISIBLE: dict[str, tuple[str, ...]] = {
    "cuda": (visible_devices.CUDA,),
    "rocm": (visible_devices.ROCR, visible_devices.HIP, visible_devices.CUDA),
}
CUMEM = "NCCL_CUMEM_ENABLE"

Check = Callable[[NodeFacts], Iterator[Finding]]


def environment_of(node: NodeFacts) -> known_bad.Environment:
    """Return the environment of the node, for the known-bad database."""
    present = {patch.name for patch in node.patches if patch.state == installed_patches.PRESENT}
    return known_bad.Environment(node.versions, node.variables, node.accelerator, present)


def versions(node: NodeFacts) -> Iterator[Finding]:
    """Check the versions and variables of the node against the known-bad database."""
    found = known_bad.judge(known_bad.load(), environment_of(node))
    if not found:
        yield Finding("versions", OK, "no known-bad combination")
    yield from found


def patched(node: NodeFacts) -> Iterator[Finding]:
    """Check that the patches of this distribution are present."""
    if not node.patches:
        yield Finding("patches", NOTE, "this environment was built without patches of rlhf-stacks")
        return
    bad = [patch for patch in node.patches if patch.state != installed_patches.PRESENT]
    for patch in bad:
        evidence = f"{patch.package}: {patch.name} is {patch.state}" + (
            f" in {patch.why}" if patch.why else ""
        )
        yield Finding(
            "patches",
            ERROR,
            "a patch is not present",
            evidence,
            "start again from the image, or reinstall its wheels",
        )
    if not bad:
        yield Finding("patches", OK, f"{len(node.patches)} patches are present")


def gpus(node: NodeFacts) -> Iterator[Finding]:
    """Compare the GPUs that the Ray node declares with those that are present and visible."""
    declared = node.resources.get("GPU", 0.0)
    if node.accelerator not in VISIBLE:
        yield Finding(
            "gpus", OK, f"this environment needs no GPU; the Ray node declares {declared:g} (simulated) GPUs"
        )
        return
    kind: visible_devices.Kind = "rocm" if node.accelerator == "rocm" else "cuda"
    names = [name for name in VISIBLE[kind] if node.variables.get(name) is not None]
    visible = len(visible_devices.visible_gpus(node.variables, kind, node.gpus))
    evidence = f"{node.gpus} in the machine, {visible} visible" + f" by {', '.join(names)}" * bool(names)
    if not node.gpus:
        yield Finding(
            "gpus",
            ERROR,
            f"no GPU is visible in this {node.accelerator} environment",
            evidence,
            "start the container with its GPUs (`--gpus all`; on ROCm /dev/kfd and /dev/dri)",
        )
    elif declared > visible:
        yield Finding(
            "gpus",
            ERROR,
            f"the Ray node declares {declared:g} GPUs, but {visible} are visible",
            evidence,
            "restart the node with --num-gpus set to the number of visible GPUs",
        )
    elif node.resources and declared < visible:
        yield Finding("gpus", NOTE, f"Ray uses {declared:g} of {visible} visible GPUs", evidence)
    else:
        yield Finding("gpus", OK, f"{visible} GPUs are visible")


def driver(node: NodeFacts) -> Iterator[Finding]:
    """Check that the NVIDIA driver supports the CUDA release that torch was built for."""
    kind, _, release = node.built_for.partition(" ")
    if kind != "cuda" or not node.driver:
        return
    oldest = host_check.oldest_driver(release)
    if oldest and host_check.numbers(node.driver) < host_check.numbers(oldest):
        yield Finding(
            "driver",
            ERROR,
            f"driver {node.driver} does not support CUDA {release}, which torch was built for",
            f"the oldest driver for it is {oldest}",
            "install a newer driver, or use an image that `rlhf-stack doctor --host` lists as running here",
        )
    else:
        yield Finding("driver", OK, f"driver {node.driver} supports CUDA {release}")


def attention(node: NodeFacts) -> Iterator[Finding]:
    """Report what computes `flash_attention_2`, which packed samples need."""
    if node.attention:
        yield Finding("attention", OK, f"flash_attention_2 is computed by {node.attention}")
    elif node.accelerator in VISIBLE:
        yield Finding(
            "attention",
            NOTE,
            "nothing here computes flash_attention_2: packed samples cannot be trained",
            remedy="install flash-attn, or use another attention implementation without packing",
        )


def libraries(node: NodeFacts) -> Iterator[Finding]:
    """Compare the NCCL of trainer and engine, which join one process group for the weight sync."""
    if node.expected_missing:
        yield Finding(
            "nccl",
            NOTE,
            "this image is a stand-in for tests, without the library of the default VLLM_NCCL_SO_PATH",
            node.missing_library,
        )
    elif node.missing_library:
        yield Finding(
            "nccl",
            ERROR,
            "VLLM_NCCL_SO_PATH names no file",
            node.missing_library,
            "unset it, or set it to the path of a libnccl.so.2, on AMD GPUs of a librccl.so",
        )
    by_user = {library.user: library for library in node.libraries}
    if len(by_user) < 2:
        return
    trainer, engine = by_user["trainer"], by_user["engine"]
    needs_cumem = _needs_cumem(trainer.version) or _needs_cumem(engine.version)
    evidence = ", ".join(
        f"{each.user} {each.version} build {each.build_id[:8] or 'unknown'}" for each in (trainer, engine)
    )
    if (trainer.version, trainer.build_id) == (engine.version, engine.build_id):
        yield Finding("nccl", OK, f"trainer and engine load NCCL {trainer.version}", evidence)
    elif not needs_cumem and node.variables.get(CUMEM) == "0":
        yield Finding(
            "nccl",
            NOTE,
            f"trainer and engine load different NCCL builds, compatible with {CUMEM}=0",
            evidence,
        )
    else:
        yield Finding(
            "nccl",
            WARNING,
            "trainer and engine load different NCCL builds",
            evidence,
            ("" if needs_cumem else f"set {CUMEM}=0 in every process, or ") + "make both load the same NCCL",
        )


def _needs_cumem(nccl: str) -> bool:
    """Whether this version of NCCL does not start with NCCL_CUMEM_ENABLE=0."""
    found = re.match(r"(\d+)\.(\d+)", nccl)
    return found is not None and (int(found[1]), int(found[2])) >= (2, 27)


def shared_memory(node: NodeFacts) -> Iterator[Finding]:
    """Check the size of /dev/shm, which holds Ray's object store and NCCL's buffers, and its free part."""
    store = int(node.resources.get("object_store_memory", 0))
    evidence = f"shared memory {size(node.shm_total)}, {size(node.shm_free)} free; object store {size(store)}"
    remedy = "set `docker run --shm-size`, or a smaller --object-store-memory"
    if store > node.shm_total:
        yield Finding(
            "shm", ERROR, "the object store does not fit in /dev/shm: Ray puts it on disk", evidence, remedy
        )
    elif node.shm_total < MIN_SHM:
        yield Finding(
            "shm", WARNING, "shared memory (/dev/shm), which NCCL and Ray use, is small", evidence, remedy
        )
    elif node.shm_free < MIN_FREE_SHM:
        yield Finding(
            "shm",
            WARNING,
            "shared memory (/dev/shm) is almost full: NCCL and PyTorch's workers fail without it",
            evidence,
            "`rlhf-stack reap` lists what ended runs left there; otherwise set `docker run --shm-size`",
        )
    else:
        yield Finding("shm", OK, evidence)


def open_files(node: NodeFacts) -> Iterator[Finding]:
    """Check the limit of open files per process."""
    limit = node.open_files
    if 0 <= limit < ENOUGH_FILES:
        yield Finding(
            "ulimit",
            WARNING if limit < MIN_FILES else NOTE,
            f"the limit of open files is {limit}",
            remedy=f"`ulimit -n {ENOUGH_FILES}`, `docker run --ulimit nofile={ENOUGH_FILES}:{ENOUGH_FILES}`",
        )
    else:
        yield Finding("ulimit", OK, "the limit of open files is high enough")


def interfaces(node: NodeFacts) -> Iterator[Finding]:
    """Check the interfaces that variables name, and the address that gloo binds to by default."""
    bad = False
    for variable in INTERFACES:
        value = node.variables.get(variable, "")
        names = [name.lstrip("=") for name in value.split(",") if name] if not value.startswith("^") else []
        exact = variable != "NCCL_SOCKET_IFNAME" or value.startswith("=")
        for name in names:
            if not any(own == name if exact else own.startswith(name) for own in node.interfaces):
                bad = True
                yield Finding(
                    "interfaces",
                    ERROR,
                    f"{variable}={value}: this node has no interface {name}",
                    f"interfaces: {', '.join(node.interfaces)}",
                    "set the variable to an existing interface, or unset it",
                )
    if bad:
        return
    if node.resolves_to.startswith("127.") and not node.variables.get(INTERFACES[0]):
        yield Finding(
            "interfaces",
            NOTE,
            f"this host's name resolves to {node.resolves_to}, and gloo binds to it",
            f"interfaces: {', '.join(node.interfaces)}",
            f"with several nodes: set {INTERFACES[0]} to the interface of the node before `ray start`",
        )
    else:
        yield Finding("interfaces", OK, f"interfaces {', '.join(node.interfaces)}")


def ports(node: NodeFacts) -> Iterator[Finding]:
    """Check that no other process uses the ports of a head node."""
    taken = ", ".join(map(str, node.taken_ports))
    if node.taken_ports and not node.resources:
        yield Finding(
            "ports",
            WARNING,
            f"no Ray node runs on this machine, but ports are in use: {taken}",
            remedy="`ray stop` if a cluster still runs; else another machine, or a container with a network "
            "of its own",
        )
    else:
        yield Finding("ports", OK, "the ports of a head are free or used by Ray")


def disks(node: NodeFacts) -> Iterator[Finding]:
    """Check the free space where Ray spills and logs, and where models are cached."""
    bad = False
    for disk in node.disks:
        evidence = f"{size(disk.free)} of {size(disk.total)} free at {disk.path}"
        if disk.total and 1 - disk.free / disk.total > FULL_DISK:
            bad = True
            yield Finding(
                "disk", ERROR, "a disk is full: Ray cannot spill objects to it", evidence, "free some of it"
            )
        elif disk.free < MIN_DISK:
            bad = True
            yield Finding("disk", WARNING, "a disk is almost full", evidence, "free some of it")
    if not bad:
        yield Finding("disk", OK, ", ".join(f"{size(disk.free)} free at {disk.path}" for disk in node.disks))


def stale(node: NodeFacts) -> Iterator[Finding]:
    """Report what a dead run left: locks, processes, GPU memory."""
    remedy = "`rlhf-stack reap` lists it; --yes removes it"
    for lock in node.stale_locks:
        yield Finding(
            "build-lock",
            ERROR,
            "a killed build left a lock: the next process that compiles this operator hangs",
            lock,
            remedy,
        )
    for process in node.stale_processes:
        yield Finding(
            "left-process", WARNING, "a process of Ray is running without its raylet", process, remedy
        )
    for holder in node.gpu_processes:
        if not holder.alive:
            yield Finding(
                "gpu-memory",
                WARNING,
                f"a process that is not visible in this container uses {holder.megabytes} MB of a GPU",
                f"{holder.pid} {holder.name}",
                "find it on the host: it belongs to another container, or has ended",
            )
    if not (node.stale_locks or node.stale_processes):
        yield Finding("left", OK, "no stale processes or locks")


CHECKS: tuple[Check, ...] = (
    versions,
    patched,
    gpus,
    driver,
    attention,
    libraries,
    shared_memory,
    open_files,
    interfaces,
    check_rdma,
    check_gpu_health,
    ports,
    disks,
    stale,
)


def check_node(node: NodeFacts) -> list[Finding]:
    """The findings of all checks for a node."""
    return [finding for check in CHECKS for finding in check(node)]


def size(amount: int) -> str:
    """Format ``amount`` bytes in GB."""
    return f"{amount / GB:.1f} GB"
