"""The health of NVIDIA GPUs: what nvidia-smi and the kernel's log report, and the findings from it."""

import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from xml.etree import ElementTree

from rlhf_stack.diagnostics.doctor.facts import GpuHealth, GpuReport, NodeFacts
from rlhf_stack.known_bad.finding import ERROR, NOTE, OK, WARNING, Finding

SMI_SECONDS = 20.0
QUERY, LINKS, KERNEL_LOG = ["nvidia-smi", "-q", "-x"], ["nvidia-smi", "nvlink", "-s"], ["dmesg"]
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
LINK_OF = re.compile(r"^GPU (\d+):|^\s+Link \d+: ([\d.]+) GB/s", re.MULTILINE)
XID = re.compile(r"NVRM: Xid \(PCI:([^)]*)\): (\d+)\b")
# Of NVIDIA's table: faults of memory, NVLink, bus or GSP. Others, such as 13, 31 and 43, come from programs.
HARDWARE_XIDS = frozenset({48, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140, 143, 144, 145, 150})
SOURCES = ("NVIDIA's documentation on Xid errors and on nvidia-smi",)


def collect_gpu_report(gpus: int) -> GpuReport:
    """Query the health of the ``gpus`` NVIDIA GPUs of this machine; nothing is run if there is none."""
    if not gpus:
        return GpuReport(unavailable="no NVIDIA GPU")
    # At once: each call of nvidia-smi initializes all GPUs if the driver's persistence mode is off.
    with ThreadPoolExecutor() as pool:
        (query, error), (links, _), (kernel, kernel_error) = pool.map(_output, (QUERY, LINKS, KERNEL_LOG))
    health = health_in(query)
    return GpuReport(
        gpus=health,
        unavailable="" if health else error or "nvidia-smi reports no GPU",
        nvlinks=active_links(links),
        xids=xids_in(kernel),
        xids_unavailable=kernel_error,
    )


def health_in(document: str) -> tuple[GpuHealth, ...]:
    """The GPUs in the output of ``nvidia-smi -q -x``; () if it is not XML."""
    try:
        root = ElementTree.fromstring(document)  # noqa: S314  (written by the driver's own tool)
    except ElementTree.ParseError:
        return ()
    return tuple(_health(index, gpu) for index, gpu in enumerate(root.findall("gpu")))


def _health(index: int, gpu: ElementTree.Element) -> GpuHealth:
    volatile = gpu.find("ecc_errors/volatile")
    texts = [
        (node.text or "").strip()
        for node in (volatile.iter() if volatile is not None else ())
        if "uncorrectable" in node.tag
    ]
    counts = [int(text) for text in texts if text.isdecimal()]
    return GpuHealth(
        index=index,
        bus=gpu.get("id", ""),
        name=_text(gpu, "product_name"),
        uncorrected=sum(counts) if counts else None,
        remap_pending="Yes" in (_text(gpu, ".//remapped_row_pending"), _text(gpu, ".//pending_retirement")),
        remap_failed=_text(gpu, ".//remapped_row_failure") == "Yes",
        slowdowns=tuple(
            name
            for name in SLOWDOWNS
            if any(node.tag.endswith(f"reason_{name}") and node.text == "Active" for node in gpu.iter())
        ),
        recovery=_text(gpu, ".//gpu_recovery_action"),
        fabric=_text(gpu, "fabric/state"),
    )


def _text(element: ElementTree.Element, path: str) -> str:
    text = (element.findtext(path) or "").strip()
    return "" if text in ("N/A", "None") else text


def active_links(listing: str) -> tuple[int, ...]:
    """The number of active NVLinks of each GPU in the output of ``nvidia-smi nvlink -s``."""
    found: list[int] = []
    for match in LINK_OF.finditer(listing):
        if match[1]:
            found.append(0)
        elif found:
            found[-1] += 1
    return tuple(found)


def xids_in(log: str) -> tuple[str, ...]:
    """The Xid errors of hardware in a kernel's log, such as "79 at 0000:3b:00 (2 times)"."""
    found = Counter((int(number), bus) for bus, number in XID.findall(log) if int(number) in HARDWARE_XIDS)
    return tuple(
        f"{number} at {bus}" + (f" ({times} times)" if times > 1 else "")
        for (number, bus), times in found.items()
    )


def check_gpu_health(node: NodeFacts) -> Iterator[Finding]:
    """Check ECC, row remapping, throttling, the fabric, NVLink and Xid errors of the GPUs of a node."""
    report = node.gpu_report
    if node.accelerator != "cuda":
        yield Finding("gpu-health", OK, "unavailable: only NVIDIA GPUs are checked, in environments for CUDA")
        return
    if report.unavailable:
        yield Finding("gpu-health", NOTE, f"the health of the GPUs is unavailable: {report.unavailable}")
        return
    found = [*(one for gpu in report.gpus for one in _of_gpu(gpu)), *_links(report), *_kernel_log(report)]
    if not any(one.severity in (WARNING, ERROR) for one in found):
        found.append(Finding("gpu-health", OK, f"{len(report.gpus)} GPUs report no fault"))
    yield from found


def _of_gpu(gpu: GpuHealth) -> Iterator[Finding]:
    where = f"GPU {gpu.index} ({gpu.name}, {gpu.bus})"
    if gpu.uncorrected or gpu.remap_failed:
        what = "a GPU cannot remap a faulty row of memory" if gpu.remap_failed else "a GPU has ECC errors"
        yield Finding(
            "gpu-ecc",
            ERROR,
            f"{what}: {where}",
            f"{gpu.uncorrected or 0} uncorrected errors since the driver was loaded",
            "take the node out of the cluster; reset the GPU, and replace it if errors return",
            SOURCES,
        )
    if gpu.remap_pending:
        yield Finding(
            "gpu-remap",
            WARNING,
            f"a GPU has to be reset before it replaces faulty memory: {where}",
            remedy="drain the node and reset the GPU (`nvidia-smi --gpu-reset`) or reboot",
            sources=SOURCES,
        )
    if gpu.recovery:
        yield Finding(
            "gpu-recovery",
            ERROR,
            f"the driver requests an action for a GPU: {gpu.recovery}: {where}",
            remedy="drain the node and do what it requests",
            sources=SOURCES,
        )
    if gpu.slowdowns:
        yield Finding(
            "gpu-throttled",
            WARNING,
            f"a GPU runs at reduced clocks: {where}",
            ", ".join(gpu.slowdowns),
            "check cooling and power supply of the node: one slow GPU slows every rank",
            SOURCES,
        )
    if gpu.fabric and gpu.fabric != "Completed":
        yield Finding(
            "gpu-fabric",
            ERROR,
            f"a GPU has not joined the NVSwitch fabric ({gpu.fabric}): {where}",
            remedy="on the host: `systemctl status nvidia-fabricmanager`, of the same version as the driver",
            sources=("pytorch/pytorch#35710",),
        )


def _links(report: GpuReport) -> Iterator[Finding]:
    """Compare GPUs of one model, since boards differ in the number of links that they use."""
    most: dict[str, int] = {}
    pairs = list(zip(report.gpus, report.nvlinks, strict=False))
    for gpu, links in pairs:
        most[gpu.name] = max(most.get(gpu.name, 0), links)
    for gpu, links in pairs:
        if links < most[gpu.name]:
            yield Finding(
                "gpu-nvlink",
                WARNING,
                f"GPU {gpu.index} ({gpu.bus}) has {links} active NVLinks, other GPUs of this machine "
                f"{most[gpu.name]}",
                remedy="`nvidia-smi nvlink -s` and `dmesg` on the host; reset or replace the GPU",
                sources=SOURCES,
            )


def _kernel_log(report: GpuReport) -> Iterator[Finding]:
    if report.xids:
        yield Finding(
            "gpu-xid",
            WARNING,
            "the kernel logged faults of GPUs since it was started",
            "Xid " + ", ".join(report.xids),
            "look each up in NVIDIA's table of Xid errors; drain the node if it was during this run",
            SOURCES,
        )
    elif report.xids_unavailable:
        yield Finding("gpu-xid", NOTE, f"Xid errors are unavailable: {report.xids_unavailable}")


def _output(command: Sequence[str]) -> tuple[str, str]:
    """The standard output of a command, and why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except FileNotFoundError:
        return "", f"{command[0]} is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        return "", f"{command[0]}: {lines[0] if lines else f'exit code {done.returncode}'}"
    return done.stdout, ""
