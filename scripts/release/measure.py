"""Measure a local image: its size, layers, versions, patches and compiled architectures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
from docker.models.images import Image

from scripts.errors import UserError
from scripts.images.inputs import INPUTS, NAMESPACE, REVISION, digest_for
from scripts.images.source import source_digest
from scripts.matrix.load import Cell
from scripts.release import image_probe
from scripts.release.facts import Layer, Measured
from scripts.testing.cluster import LABEL, owner_label, remove_on_exit
from scripts.testing.records import now

PROBE = Path(image_probe.__file__)
SECONDS = 600
# Digest of a layer without changes, which has no size of its own in an image's history.
EMPTY = "sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"


class OtherInputsError(UserError):
    """The image is of the cell, and a build would now make another one."""


def measure(client: docker.DockerClient, cell: Cell, image: Image) -> Measured:
    """Return the measurements of an image; `OtherInputsError` if a build would now make another one."""
    labels, source, inputs = image.labels, source_digest(cell), digest_for(cell)
    if labels.get(f"{NAMESPACE}.cell") != cell.id:
        raise UserError(f"{cell.tag} is the tag of another image: rebuild it")
    if labels.get(INPUTS) != inputs:
        raise OtherInputsError(f"{cell.id} was built from other inputs than this checkout's: rebuild it")
    history = image.history()
    return Measured(
        cell=cell.id,
        image=str(image.id),
        inputs=inputs,
        source=source,
        revision=labels.get(REVISION, ""),
        when=now(),
        stand_in=labels.get(f"{NAMESPACE}.stand-in", ""),
        size=sum(step["Size"] for step in history),
        layers=layers_of(image.attrs["RootFS"]["Layers"], history),
        versions=_versions(labels),
        patches=tuple(labels.get(f"{NAMESPACE}.patches", "").split()),
        architectures={name: tuple(names) for name, names in probe(client, image)["packages"].items()},
    )


def probe(client: docker.DockerClient, image: Image) -> dict[str, dict[str, list[str]]]:
    """Run `image_probe` in a container of the image; return architectures by "packages" and "libraries"."""
    container = client.containers.create(
        str(image.id),
        ["python", "-I", "/opt/image_probe.py"],
        volumes={str(PROBE): {"bind": "/opt/image_probe.py", "mode": "ro"}},
        network_mode="none",
        labels={LABEL: owner_label()},
    )
    with remove_on_exit([container]):
        container.start()
        code = container.wait(timeout=SECONDS)["StatusCode"]
        printed = container.logs(stdout=True, stderr=False).decode()
        if code:
            error = container.logs(tail=1).decode().strip() or "it printed no error"
            raise UserError(f"{image.tags[0]} cannot be probed: {error}: rebuild it")
    probed: dict[str, dict[str, list[str]]] = json.loads(printed.splitlines()[-1])
    return probed


def layers_of(digests: Sequence[str], history: Sequence[Mapping[str, Any]]) -> tuple[Layer, ...]:
    """Return the layers of an image, bottom first, from its digests and its history (newest first).

    The history has steps without a layer, and sizes without a digest; if they disagree, the result is empty.
    """
    sizes = [int(step["Size"]) for step in reversed(history) if step["Size"]]
    filled = [digest for digest in digests if digest != EMPTY]
    if len(sizes) != len(filled):
        return ()
    return tuple(Layer(digest, size) for digest, size in zip(filled, sizes, strict=True))


def _versions(labels: Mapping[str, str]) -> dict[str, str]:
    prefix = f"{NAMESPACE}.version."
    return {name.removeprefix(prefix): text for name, text in labels.items() if name.startswith(prefix)}
