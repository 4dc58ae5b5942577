"""The test suites, each declared once: the matrix, commands, records and the catalogue read this table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

EVERY_KIND = ("cpu", "cuda", "rocm")
OTHER_CELL = "for .*, which this cell does not have"  # the marks `carries` and `patch` of tests
OTHER_RAY = "(newer releases of Ray|Ray 2.55.0 is|this Ray does not|Ray [0-9.]+ does not) .*"
OTHER_TRANSFORMERS = r"module 'transformers' has __version__ '4\.[0-9.]+', required is: '5\.0'"
NEEDS_GPU = (
    "(this image (is for|needs a) GPU|needs a GPU and its driver"
    "|vLLM's engine for CPUs is not in this image).*"
)
# What decides whether a patch is proved, and which of its changes were executed.
PROOFS = ("scripts/testing/proofs.py", "scripts/patches/leave_out.py", "scripts/patches/changes.py")


@dataclass(frozen=True)
class Suite:
    """A test suite: the pytest files of ``tests/<folder>``, of which ``marks`` (pytest's -m) selects some.

    ``place`` is where pytest runs: inside the image, or on the host against the image; a ``command`` is no
    pytest suite but a command of its own, with the suite's name. A ``strict`` suite runs a second time, with
    fewer rights (see `testing.in_image`). Publishing requires a record of the suite for the accelerators in
    ``required_for``, and for the default cell if ``of_default``; ``skips`` are regular expressions of the
    reasons for which its tests may then be skipped, ``skips_once`` of those for which a test may be skipped
    that passes in the other of two runs. ``reads`` are paths of the repository that its tests read. A suite
    that is ``always`` run, also after a pass, depends on today's package index or writes more than a record.
    ``title`` describes the suite in the catalogue. After ``hours``, several times what a slow machine needs,
    the container of a run inside the image is killed.
    """

    title: str
    place: Literal["image", "host", "command"]
    folder: str = ""
    marks: str = ""
    strict: bool = False
    required_for: tuple[str, ...] = ()
    of_default: bool = False
    skips: tuple[str, ...] = ()
    skips_once: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    always: bool = False
    hours: float = 6.0


SUITES: Mapping[str, Suite] = {
    "image": Suite(
        "in a container of the image: as its own user, then as an unknown user on a read-only root",
        place="image",
        folder="image",
        strict=True,
        required_for=EVERY_KIND,
        skips=(
            OTHER_CELL,
            NEEDS_GPU,
            "DeepSpeed's operator needs a GPU in this image",
            "DeepSpeed 0.15's own gather over gloo fails in this measurement",
            "flash_attn is installed and is what models use",
            "the matrix (builds no op for this cell|has no profile for this accelerator)",
            "this image is ours: no package is added to it",
            "this image has no OpenTelemetry",
            "this image has no Triton for AMD GPUs",
            "this image has no nvcc",
            "this image promises no GPU",
            "this torch has no variable-length attention",
            "vLLM's operators of this cell come with its wheel",
            r"\S+ has no shared object in this image",
        ),
        skips_once=("measured once, as the image's own user",),
    ),
    "layers": Suite(
        "the image from outside: size, labels, base, no secret in a layer, code for the promised GPUs",
        place="host",
        folder="layers",
        required_for=EVERY_KIND,
        skips=("this image promises no GPU",),
    ),
    "patches": Suite(
        "each patch's test, without this patch alone and with all patches",
        place="image",
        folder="patches",
        required_for=EVERY_KIND,
        skips=(
            OTHER_CELL,
            "flash_attn is installed here, where this patch changes nothing",
            "in this GPU image the patch does exactly what upstream does",
            "vLLM's engine for CPUs is not in this image",
            "of the releases here only Ray 2.12.0 has this AMD support",
            "the OpenRLHF of this cell uses no NOSET variable",
        ),
        reads=PROOFS,
    ),
    "cluster": Suite(
        "simulated: several Ray nodes in one container",
        place="image",
        folder="cluster",
        marks="not integration",
        required_for=("cpu",),
        skips=(OTHER_CELL, OTHER_RAY, OTHER_TRANSFORMERS, NEEDS_GPU, "this image is for a CPU"),
    ),
    "integration": Suite(
        "simulated: a step of training on up to four nodes of eight GPUs, engines up to TP 8; calls to the "
        "device are replaced in images for GPUs, and with vLLM 0.4.2 for engines above TP 1",
        place="image",
        folder="cluster",
        marks="integration",
        required_for=EVERY_KIND,
        skips=(OTHER_CELL, OTHER_TRANSFORMERS, NEEDS_GPU),
        reads=PROOFS,
        hours=12.0,
    ),
    "network": Suite(
        "several containers as nodes, each with its own address",
        place="host",
        folder="network",
        marks="not integration",
        required_for=("cpu",),
        skips=(OTHER_CELL, OTHER_RAY, "the matrix has no profile for this accelerator"),
        reads=("images/examples",),
    ),
    "operation": Suite(
        "containers as nodes: runs that lose nodes or are preempted continue; certify climbs its ladder",
        place="host",
        folder="network",
        marks="integration",
        required_for=("cpu",),
        skips=(
            OTHER_CELL,
            OTHER_RAY,
            "this release saves no checkpoint on request",
            "OpenRLHF 0.5 cannot load a checkpoint of another number of ranks",
        ),
        reads=("images/examples",),
    ),
    "registry": Suite(
        "pushed to a registry and pulled by digest; an image built FROM it",
        place="host",
        folder="registry",
        of_default=True,
        reads=("images/examples", "tests/cluster"),
    ),
    "demo": Suite(
        "a training run on the CPU, on two containers as nodes", place="command", required_for=("cpu",)
    ),
    "faults": Suite(
        "a training run on containers as nodes, with an injected fault; its outcomes are listed below",
        place="host",
        folder="faults",
        always=True,
        skips=("this release has no hybrid layout",),
    ),
    "hip": Suite(
        "the ROCm recipes compiled by Debian's HIP, and kernels of them executed on an emulator of CDNA",
        place="command",
        skips=(
            "RLHF_STACK_CDNA_EMULATOR is not set",
            "the emulator (lacks|has cases for) .*",
            "not compiled within .*|not reached",
        ),
        reads=("scripts/hip/emulate.py", "scripts/hip/requirements.txt"),  # what prove.py does not import
    ),
    "known-bad": Suite(
        "rows of the known-bad database that still apply: requirements resolved, probes run in the image",
        place="command",
        of_default=True,
        skips=("its sources alone", "elsewhere: .*"),
        always=True,
    ),
}
