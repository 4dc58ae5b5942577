"""Checks that NCCL can use the RDMA adapters of a node: pure functions from its facts to findings.

Without any one of its requirements NCCL uses TCP, and logs this only with NCCL_DEBUG=INFO.
"""

import re
from collections.abc import Iterator, Sequence

from rlhf_stack.diagnostics.doctor.facts import NodeFacts
from rlhf_stack.diagnostics.network_adapters import RdmaAdapter, nccl_adapters
from rlhf_stack.known_bad.finding import NOTE, OK, WARNING, Finding

UNLIMITED = -1
DMA_BUF_KERNEL = (5, 12)  # the first Linux in which a network adapter can register GPU memory by DMA-BUF
MOUNT = (
    "`docker run --device /dev/infiniband --ulimit memlock=-1`; in Kubernetes, request the resource of the "
    "RDMA device plugin, for EFA vpc.amazonaws.com/efa"
)
FALLBACK = ("NVIDIA/nccl#451", "NVIDIA/nccl#1410", "vllm-project/vllm#42075")
GPUDIRECT = ("NVIDIA's GPU Operator documentation on GPUDirect RDMA",)


def check_rdma(node: NodeFacts) -> Iterator[Finding]:
    """Check verbs library, device files, NCCL plugin, locked memory and GPUDirect of a node with GPUs."""
    adapters = node.rdma.adapters
    usable = nccl_adapters(adapters, node.variables)
    if not adapters:
        yield Finding("rdma", OK, "the node has no RDMA adapter")
    elif node.accelerator not in ("cuda", "rocm"):
        yield Finding("rdma", OK, "this environment uses no RDMA", _names(adapters))
    elif not usable:
        yield Finding("rdma", NOTE, "NCCL uses TCP: " + _unused(adapters), _names(adapters))
    else:
        yield from _access(node, usable)
        yield from _inactive(adapters)
        yield from _locked_memory(node, usable)
        yield from _gpudirect(node, usable)


def _unused(adapters: Sequence[RdmaAdapter]) -> str:
    if any(each.active for each in adapters):
        return "NCCL_NET, NCCL_IB_DISABLE or NCCL_IB_HCA excludes the RDMA adapters"
    return "no port of the RDMA adapters is active"


def _access(node: NodeFacts, usable: Sequence[RdmaAdapter]) -> Iterator[Finding]:
    """Report the first requirement that is missing, for InfiniBand and RoCE, and for EFA."""
    facts, names = node.rdma, _names(usable)
    if not any(each.accessible for each in usable):
        yield Finding(
            "rdma",
            WARNING,
            "this container has no access to the RDMA adapters of the node: NCCL uses TCP",
            f"{names}; no readable and writable /dev/infiniband/uverbs*",
            MOUNT,
            FALLBACK,
        )
    elif facts.verbs is None:
        yield Finding(
            "rdma",
            WARNING,
            "libibverbs cannot be loaded: NCCL uses TCP, although the node has RDMA adapters",
            f"{names}; {facts.verbs_error}",
            "install libibverbs1 and ibverbs-providers; the GPU images of rlhf-stacks contain them",
            FALLBACK,
        )
    elif not facts.verbs:
        yield Finding(
            "rdma",
            WARNING,
            "libibverbs finds none of the RDMA adapters: NCCL uses TCP",
            "; ".join(filter(None, (names, facts.verbs_error))),
            "install the drivers of libibverbs (ibverbs-providers) in a release that supports the adapter",
            FALLBACK,
        )
    elif any(each.is_efa for each in usable) and not facts.net_plugin:
        yield Finding(
            "efa",
            WARNING,
            "NCCL cannot load aws-ofi-nccl: it uses TCP, although the node has EFA adapters",
            names,
            "derive an image as in images/examples/efa.Dockerfile; if it is installed, add its folder to "
            "LD_LIBRARY_PATH and set NCCL_NET_PLUGIN=ofi",
            ("NVIDIA-NeMo/RL#2359",),
        )
    else:
        yield Finding("rdma", OK, "NCCL can use the RDMA adapters", names)


def _inactive(adapters: Sequence[RdmaAdapter]) -> Iterator[Finding]:
    down = [each for each in adapters if not each.active]
    if down:
        yield Finding(
            "rdma-ports",
            NOTE,
            f"{len(down)} of {len(adapters)} RDMA adapters have no active port",
            _names(adapters),
            "if they are meant to be used: check cable and switch with `ibstat`",
        )


def _locked_memory(node: NodeFacts, usable: Sequence[RdmaAdapter]) -> Iterator[Finding]:
    limit = node.rdma.memlock
    if limit != UNLIMITED:
        yield Finding(
            "memlock",
            WARNING,
            f"the limit of locked memory is {limit // 1024} KiB: NCCL may fail to register buffers for RDMA",
            _names(usable),
            "`docker run --ulimit memlock=-1`, LimitMEMLOCK=infinity for containerd or slurmd; "
            "`ulimit -l` must be unlimited in the container",
            ("NCCL's documentation on troubleshooting", "NVIDIA/nccl-tests#206"),
        )
    else:
        yield Finding("memlock", OK, "locked memory is not limited")


def _gpudirect(node: NodeFacts, usable: Sequence[RdmaAdapter]) -> Iterator[Finding]:
    """Check what NVIDIA documents as requirements; EFA and AMD need none of these modules."""
    if node.accelerator != "cuda" or not node.gpus or all(each.is_efa for each in usable):
        return
    facts = node.rdma
    evidence = f"Linux {facts.kernel}, {'open' if facts.open_driver else 'proprietary'} modules of the driver"
    if facts.peer_memory:
        yield Finding("gpudirect", OK, "nvidia_peermem is loaded")
    elif facts.open_driver and _release(facts.kernel) >= DMA_BUF_KERNEL:
        yield Finding("gpudirect", OK, "kernel and driver support GPUDirect RDMA by DMA-BUF", evidence)
    else:
        yield Finding(
            "gpudirect",
            NOTE,
            "nvidia_peermem is not loaded, and DMA-BUF is probably unsupported: without GPUDirect RDMA, NCCL "
            "copies through host memory",
            evidence,
            "on the host: `modprobe nvidia_peermem`, or the driver's open modules with Linux 5.12 or newer",
            GPUDIRECT,
        )


def _release(kernel: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", kernel)
    return (int(found[1]), int(found[2])) if found else ()


def _names(adapters: Sequence[RdmaAdapter]) -> str:
    """The adapters with their speeds, such as "mlx5_0 400 Gbit/s, mlx5_1 no active port"."""
    return ", ".join(
        f"{each.name} {f'{each.megabits / 1000:g} Gbit/s' if each.active else 'no active port'}"
        for each in adapters
    )
