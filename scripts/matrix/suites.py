"""The test suites, each declared once: the matrix, commands, records and the catalogue read this table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

EVERY_KIND = ("cpu", "cuda", "rocm")


@dataclass(frozen=True)
class Suite:
    """A test suite: the pytest files of ``tests/<folder>``, of which ``marks`` (pytest's -m) selects some.

    ``place`` is where pytest runs: inside the image, or on the host against the image; ``demo`` is no pytest
    suite but a command of its own. A ``strict`` suite runs a second time, with fewer rights (see
    `testing.in_image`). Publishing requires a record of the suite for the accelerators in ``required_for``.
    ``title`` describes the suite in the catalogue.
    """

    title: str
    place: Literal["image", "host", "demo"]
    folder: str = ""
    marks: str = ""
    strict: bool = False
    required_for: tuple[str, ...] = ()


SUITES: Mapping[str, Suite] = {
    "image": Suite(
        "in a container of the image: as its own user, then as an unknown user on a read-only root",
        place="image",
        folder="image",
        strict=True,
        required_for=EVERY_KIND,
    ),
    "layers": Suite(
        "the image from outside: size, labels, base, no secret in a layer",
        place="host",
        folder="layers",
        required_for=EVERY_KIND,
    ),
    "patches": Suite(
        "each patch's test, on the package as released and on the patched package",
        place="image",
        folder="patches",
        required_for=EVERY_KIND,
    ),
    "cluster": Suite(
        "simulated: several Ray nodes in one container",
        place="image",
        folder="cluster",
        marks="not integration",
        required_for=("cpu",),
    ),
    "integration": Suite(
        "simulated: a step of training on up to four nodes of eight GPUs, engines up to TP 8; calls to the "
        "device are replaced in images for GPUs, and with vLLM 0.4.2 for engines above TP 1",
        place="image",
        folder="cluster",
        marks="integration",
        required_for=EVERY_KIND,
    ),
    "network": Suite(
        "several containers as nodes, each with its own address",
        place="host",
        folder="network",
        required_for=("cpu",),
    ),
    "registry": Suite(
        "pushed to a registry and pulled by digest; an image built FROM it", place="host", folder="registry"
    ),
    "demo": Suite(
        "a training run on the CPU, on two containers as nodes", place="demo", required_for=("cpu",)
    ),
    "faults": Suite(
        "a training run on four containers into which a fault is injected; its outcomes are listed below",
        place="host",
        folder="faults",
    ),
}
