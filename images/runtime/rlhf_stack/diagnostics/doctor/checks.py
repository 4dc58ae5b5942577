"""The checks of one node: each looks at its facts and says what it found, which is "ok" where all is well:
pure."""

from collections.abc import Callable, Iterator

from rlhf_stack import known_bad
from rlhf_stack.diagnostics import installed_patches
from rlhf_stack.diagnostics.doctor.facts import Node
from rlhf_stack.known_bad.finding import ERROR, NOTE, OK, WARNING, Finding

GB = 10**9
SHM_LEAST = 1 << 30
FILES_LEAST, FILES_ENOUGH = 4096, 65536
DISK_FULL, DISK_LEAST = 0.95, 10 * GB
# NVIDIA's table of the oldest driver for each major version of CUDA.
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
VISIBLE = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}
CUMEM = "NCCL_CUMEM_ENABLE"

Check = Callable[[Node], Iterator[Finding]]


def versions(node: Node) -> Iterator[Finding]:
    """The versions and variables of the node against the known-bad database."""
    present = {patch.name for patch in node.patches if patch.state == installed_patches.PRESENT}
    judged = known_bad.Environment(node.versions, node.variables, node.accelerator, present)
    found = known_bad.judge(known_bad.load(), judged)
    if not found:
        yield Finding("versions", OK, "no combination that is known to be bad")
    yield from found


def patched(node: Node) -> Iterator[Finding]:
    """Whether the patches of this distribution are as they were built."""
    if not node.patches:
        yield Finding("patches", NOTE, "this environment was not built with patches of rlhf-stacks")
        return
    bad = [patch for patch in node.patches if patch.state != installed_patches.PRESENT]
    for patch in bad:
        evidence = f"{patch.package}: {patch.name} is {patch.state}" + (
            f" in {patch.why}" if patch.why else ""
        )
        yield Finding(
            "patches",
            ERROR,
            "a patch is not there",
            evidence,
            "start from the image again, or reinstall its wheels",
        )
    if not bad:
        yield Finding("patches", OK, f"{len(node.patches)} patches are present")


def gpus(node: Node) -> Iterator[Finding]:
    """The GPUs that Ray was told of against those that are there and visible."""
    told = node.resources.get("GPU", 0.0)
    if node.accelerator not in VISIBLE:
        yield Finding("gpus", OK, f"no GPU is expected here; Ray was told of {told:g} (fake) GPUs")
        return
    names = [name for name in VISIBLE[node.accelerator] if node.variables.get(name) is not None]
    shown = node.gpus if not names else min(node.gpus, len(listed(node.variables[names[0]])))
    evidence = f"{node.gpus} in the machine, {shown} visible" + (f" by {names[0]}" if names else "")
    if not node.gpus:
        yield Finding(
            "gpus",
            ERROR,
            f"no GPU is to be seen, and this is a {node.accelerator} environment",
            evidence,
            "start the container with its GPUs (`--gpus all`; on ROCm /dev/kfd and /dev/dri)",
        )
    elif told > shown:
        yield Finding(
            "gpus",
            ERROR,
            f"Ray was told of {told:g} GPUs and {shown} are visible",
            evidence,
            "start the node again with --num-gpus as many as are visible",
        )
    elif node.resources and told < shown:
        yield Finding("gpus", NOTE, f"Ray uses {told:g} of {shown} visible GPUs", evidence)
    else:
        yield Finding("gpus", OK, f"{shown} GPUs are visible")


def driver(node: Node) -> Iterator[Finding]:
    """The NVIDIA driver against the CUDA that torch was built for."""
    kind, _, release = node.built_for.partition(" ")
    if kind != "cuda" or not node.driver:
        return
    oldest = OLDEST_DRIVER.get(int(release.split(".")[0]))
    have = tuple(int(part) for part in node.driver.split(".")[:2])
    if oldest and have < oldest:
        yield Finding(
            "driver",
            ERROR,
            f"the driver {node.driver} cannot run CUDA {release}, for which torch was built",
            f"the oldest that can is {oldest[0]}.{oldest[1]}",
            "a newer driver, or a cell with an older CUDA",
        )
    else:
        yield Finding("driver", OK, f"driver {node.driver} runs CUDA {release}")


def libraries(node: Node) -> Iterator[Finding]:
    """The NCCL of trainer and engine, which meet in one group when weights are sent."""
    if node.missing_library:
        yield Finding(
            "nccl",
            ERROR,
            "VLLM_NCCL_SO_PATH names no file",
            node.missing_library,
            "unset it, or name a libnccl.so.2",
        )
    by_user = {library.user: library for library in node.libraries}
    if len(by_user) < 2:
        return
    one, other = by_user["trainer"], by_user["engine"]
    evidence = ", ".join(
        f"{each.user} {each.version} build {each.build_id[:8] or 'unknown'}" for each in (one, other)
    )
    if (one.version, one.build_id) == (other.version, other.build_id):
        yield Finding("nccl", OK, f"trainer and engine load NCCL {one.version}", evidence)
    elif node.variables.get(CUMEM) == "0":
        yield Finding("nccl", NOTE, f"trainer and engine load two NCCLs, alike by {CUMEM}=0", evidence)
    else:
        yield Finding(
            "nccl",
            WARNING,
            "trainer and engine load two NCCLs",
            evidence,
            f"set {CUMEM}=0 in every process, or let both load one",
        )


def shared_memory(node: Node) -> Iterator[Finding]:
    """The shared memory of the node against Ray's object store, which lies in it."""
    store = int(node.resources.get("object_store_memory", 0))
    evidence = f"shared memory {size(node.shm_total)}, {size(node.shm_free)} free; object store {size(store)}"
    remedy = "`docker run --shm-size`, or a smaller --object-store-memory"
    if store > node.shm_total:
        yield Finding(
            "shm",
            ERROR,
            "the object store does not fit into /dev/shm: Ray puts it on a disk",
            evidence,
            remedy,
        )
    elif node.shm_total < SHM_LEAST:
        yield Finding(
            "shm", WARNING, "shared memory (/dev/shm) is small: NCCL and Ray use it", evidence, remedy
        )
    else:
        yield Finding("shm", OK, evidence)


def open_files(node: Node) -> Iterator[Finding]:
    """How many files a process may open."""
    limit = node.open_files
    if 0 <= limit < FILES_ENOUGH:
        yield Finding(
            "ulimit",
            WARNING if limit < FILES_LEAST else NOTE,
            f"a process may open {limit} files",
            remedy=f"`ulimit -n {FILES_ENOUGH}`, `docker run --ulimit nofile={FILES_ENOUGH}:{FILES_ENOUGH}`",
        )
    else:
        yield Finding("ulimit", OK, "enough files may be open")


def interfaces(node: Node) -> Iterator[Finding]:
    """The interfaces that variables name, and what gloo binds to without them."""
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
                    f"it has {', '.join(node.interfaces)}",
                    "name one of these, or unset the variable",
                )
    if bad:
        return
    if node.resolves_to.startswith("127.") and not node.variables.get(INTERFACES[0]):
        yield Finding(
            "interfaces",
            NOTE,
            f"the name of this host stands for {node.resolves_to}, which gloo binds to",
            f"interfaces: {', '.join(node.interfaces)}",
            f"on more than one node: {INTERFACES[0]} to the interface of its address, before `ray start`",
        )
    else:
        yield Finding("interfaces", OK, f"interfaces {', '.join(node.interfaces)}")


def ports(node: Node) -> Iterator[Finding]:
    """Ports that a head needs, taken by something else."""
    taken = ", ".join(map(str, node.taken_ports))
    if node.taken_ports and not node.resources:
        yield Finding(
            "ports",
            WARNING,
            f"no Ray node runs here, and something listens on {taken}",
            remedy="`ray stop`, if a cluster was left; else `ray start --head --port` another",
        )
    else:
        yield Finding("ports", OK, "the ports of a head are free or its own")


def disks(node: Node) -> Iterator[Finding]:
    """Where Ray spills and writes logs, and where models are cached."""
    bad = False
    for disk in node.disks:
        evidence = f"{size(disk.free)} of {size(disk.total)} free at {disk.path}"
        if disk.total and 1 - disk.free / disk.total > DISK_FULL:
            bad = True
            yield Finding(
                "disk", ERROR, "a disk is full: Ray spills no object to it", evidence, "free some of it"
            )
        elif disk.free < DISK_LEAST:
            bad = True
            yield Finding("disk", WARNING, "little room is left on a disk", evidence, "free some of it")
    if not bad:
        yield Finding("disk", OK, ", ".join(f"{size(disk.free)} free at {disk.path}" for disk in node.disks))


def left(node: Node) -> Iterator[Finding]:
    """What a dead run left: locks, processes, memory of GPUs."""
    remedy = "`rlhf-stack reap` shows it, with --yes it is removed"
    for lock in node.left_locks:
        yield Finding(
            "build-lock",
            ERROR,
            "a killed build left a lock: who compiles that operator waits for ever",
            lock,
            remedy,
        )
    for process in node.left_processes:
        yield Finding(
            "left-process", WARNING, "a process of Ray lives on without its raylet", process, remedy
        )
    for holder in node.gpu_processes:
        if not holder.alive:
            yield Finding(
                "gpu-memory",
                WARNING,
                f"a process that is not to be seen here holds {holder.megabytes} MB of a GPU",
                f"{holder.pid} {holder.name}",
                "look for it on the host: another container's, or dead",
            )
    if not (node.left_locks or node.left_processes):
        yield Finding("left", OK, "no dead run left anything")


CHECKS: tuple[Check, ...] = (
    versions,
    patched,
    gpus,
    driver,
    libraries,
    shared_memory,
    open_files,
    interfaces,
    ports,
    disks,
    left,
)


def of_node(node: Node) -> list[Finding]:
    """What all the checks say of a node."""
    return [finding for check in CHECKS for finding in check(node)]


def listed(value: str) -> list[str]:
    """The devices in the value of a *_VISIBLE_DEVICES variable, up to one that is none."""
    found: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry in ("", "-1", "NoDevFiles"):
            break
        found.append(entry)
    return found


def size(amount: int) -> str:
    """Bytes, for people."""
    return f"{amount / GB:.1f} GB"
