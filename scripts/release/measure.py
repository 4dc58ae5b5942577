"""Measure a local image: its size, layers, versions, patches, compiled architectures and test records."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
from docker.models.images import Image

from scripts import git
from scripts.errors import UserError
from scripts.images.inputs import NAMESPACE, REVISION
from scripts.matrix.load import Cell
from scripts.patches.series import Series, series_of
from scripts.release import image_probe
from scripts.release.facts import Facts, Layer, SuiteResult, lock_digest, series_digest
from scripts.testing import records
from scripts.testing.cluster import LABEL, owner_label, remove_on_exit
from scripts.testing.proofs import proofs_of

PROBE = Path(image_probe.__file__)
SECONDS = 600
# Digest of a layer without changes, which has no size of its own in an image's history.
EMPTY = "sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"


def measure(client: docker.DockerClient, cell: Cell, image: Image, folder: Path = records.RECORDS) -> Facts:
    """Return the facts of an image; `UserError` if it was built from another lock or other patches.

    ``folder`` contains the test records.
    """
    probed = probe(client, image)
    series, labels = series_of(cell), image.labels
    if labels.get(f"{NAMESPACE}.cell") != cell.id:
        raise UserError(f"{cell.tag} is the tag of another image")
    if probed["lock"] != lock_digest(cell):
        raise UserError(f"{cell.id} was built from another lock")
    revision = labels.get(REVISION, "")
    same = patched(series) == [_named(manifest) for manifest in probed["patched"]]
    if not same or git.changed_since(revision, [f"patches/{s.package}/{s.version}" for s in series]):
        raise UserError(f"{cell.id} was built with other patches")
    found = records.read(str(image.id), folder)
    history = image.history()
    return Facts(
        image=str(image.id),
        revision=revision,
        stand_in=labels.get(f"{NAMESPACE}.stand-in", ""),
        size=sum(step["Size"] for step in history),
        layers=layers_of(image.attrs["RootFS"]["Layers"], history),
        versions=_versions(labels),
        lock=probed["lock"],
        series=series_digest(series),
        patches=tuple(labels.get(f"{NAMESPACE}.patches", "").split()),
        proofs=proofs_of(series, found["patches"].proofs if "patches" in found else ()),
        architectures={name: tuple(names) for name, names in probed["architectures"].items()},
        suites={
            name: SuiteResult(run.outcome, run.passed, run.failed, run.skipped, run.seconds)
            for name, run in found.items()
        },
    )


def probe(client: docker.DockerClient, image: Image) -> dict[str, Any]:
    """Run `image_probe` in a container of the image and return its output."""
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
            raise UserError(f"{image.tags[0]} cannot be probed: {error}")
    probed: dict[str, Any] = json.loads(printed.splitlines()[-1])
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


def patched(series: Iterable[Series]) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """Return package, version, label and patches of each series, as images record them."""
    return [(s.package, s.version, s.label, tuple(p.name for p in s.patches)) for s in series]


def _named(manifest: Mapping[str, Any]) -> tuple[str, str, str, tuple[str, ...]]:
    names = tuple(patch["name"] for patch in manifest["patches"])
    return manifest["package"], manifest["version"], manifest["label"], names


def _versions(labels: Mapping[str, str]) -> dict[str, str]:
    prefix = f"{NAMESPACE}.version."
    return {name.removeprefix(prefix): text for name, text in labels.items() if name.startswith(prefix)}
