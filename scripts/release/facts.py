"""What was measured of the cells' images: ``images/catalogue.json``, from which the catalogue is written.

A cell's facts hold for the lock, the patches and the versions that its image was made from, and no longer.
"""

import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
import docker.errors
import msgspec
from docker.models.images import Image

from scripts.errors import UserError
from scripts.images.inputs import NAMESPACE, REVISION
from scripts.locks import lockfile
from scripts.matrix.load import Cell
from scripts.patches.series import Series, series_of
from scripts.paths import ROOT
from scripts.testing import records
from scripts.testing.cluster import LABEL, owner_label, remove_on_exit
from scripts.testing.proofs import Proved, proofs_of

CATALOGUE = ROOT / "images" / "catalogue.json"
INSIDE = ROOT / "scripts" / "inside.py"
SECONDS = 600
# The digest of a layer in which nothing changed: it has no size of its own in an image's history.
EMPTY = "sha256:5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef"


class Layer(msgspec.Struct, frozen=True):
    """A layer by the digest of its content, with its size in bytes, unpacked."""

    digest: str
    size: int


class Suite(msgspec.Struct, frozen=True):
    """What a suite said of the image."""

    outcome: str
    passed: int
    failed: int
    skipped: int
    seconds: float


class Facts(msgspec.Struct, frozen=True):
    """What was measured of a cell's image. ``size`` in bytes; ``layers`` bottom first, none if not known."""

    image: str
    revision: str
    stand_in: str
    size: int
    layers: tuple[Layer, ...]
    versions: dict[str, str]
    lock: str
    series: str
    patches: tuple[str, ...]
    proofs: dict[str, Proved]
    architectures: dict[str, tuple[str, ...]]
    suites: dict[str, Suite]


def load(path: Path = CATALOGUE) -> dict[str, Facts]:
    """The facts by cell; a `UserError` if the file is not what we wrote."""
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Facts])
    except msgspec.DecodeError as error:
        raise UserError(f"{path.name}: {error}; it is written by `nox -s catalogue`, not by hand") from None


def dump(facts: Mapping[str, Facts]) -> str:
    """The text of the file: sorted, one field a line."""
    return json.dumps(msgspec.to_builtins(facts), indent=1, sort_keys=True) + "\n"


def lock_digest(cell: Cell) -> str:
    """The sha256 of a cell's lock, empty if it has none yet."""
    path = lockfile.path(cell)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def series_digest(series: Iterable[Series]) -> str:
    """The sha256 of what patch series change; their headers may be kept up to date without a new image."""
    said = [(s.package, s.version, s.label, patch.name, patch.diff) for s in series for patch in s.patches]
    return hashlib.sha256(repr(said).encode()).hexdigest()


def outdated(cell: Cell, facts: Facts) -> str | None:
    """In what the facts are of another cell than the tree has now; None if they hold."""
    if facts.versions != cell.versions:
        return "versions"
    if facts.lock != lock_digest(cell):
        return "lock"
    if facts.series != series_digest(series_of(cell)):
        return "patches"
    return None


def layers_of(digests: Sequence[str], history: Sequence[Mapping[str, Any]]) -> tuple[Layer, ...]:
    """The layers of an image, bottom first, by its digests and its history (newest first).

    The history has steps without a layer, and sizes without a digest; where they do not add up, none.
    """
    sizes = [int(step["Size"]) for step in reversed(history) if step["Size"]]
    filled = [digest for digest in digests if digest != EMPTY]
    if len(sizes) != len(filled):
        return ()
    return tuple(Layer(digest, size) for digest, size in zip(filled, sizes, strict=True))


def shared(cell: str, facts: Mapping[str, Facts]) -> int | None:
    """Bytes of a cell's layers that another cell of ``facts`` has too; None where layers are not known."""
    own = facts[cell].layers
    others = {layer.digest for name, other in facts.items() if name != cell for layer in other.layers}
    return sum(layer.size for layer in own if layer.digest in others) if own else None


def look_inside(client: docker.DockerClient, image: Image) -> dict[str, Any]:
    """What `scripts.release.image_probe` prints in a container of the image."""
    container = client.containers.create(
        str(image.id),
        ["python", "-I", "/opt/inside.py"],
        volumes={str(INSIDE): {"bind": "/opt/inside.py", "mode": "ro"}},
        network_mode="none",
        labels={LABEL: owner_label()},
    )
    with remove_on_exit([container]):
        container.start()
        code = container.wait(timeout=SECONDS)["StatusCode"]
        printed = container.logs(stdout=True, stderr=False).decode()
        if code:
            said = container.logs(tail=1).decode().strip() or "it printed nothing"
            raise UserError(f"{image.tags[0]} cannot be looked into: {said}")
    facts: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return facts


def measure(client: docker.DockerClient, cell: Cell, image: Image, kept: Path = records.RECORDS) -> Facts:
    """The facts of an image of ``cell``; a `UserError` if it was made from another lock or other patches."""
    inside = look_inside(client, image)
    series, labels = series_of(cell), image.labels
    if labels.get(f"{NAMESPACE}.cell") != cell.id:
        raise UserError(f"{cell.tag} is the tag of another image")
    if inside["lock"] != lock_digest(cell):
        raise UserError(f"{cell.id} was built from another lock")
    revision = labels.get(REVISION, "")
    same = patched(series) == [_named(manifest) for manifest in inside["patched"]]
    if not same or _repatched(series, revision):
        raise UserError(f"{cell.id} was built with other patches")
    found = records.read(str(image.id), kept)
    proofs = found["patches"].proofs if "patches" in found else ()
    history = image.history()
    return Facts(
        image=str(image.id),
        revision=revision,
        stand_in=labels.get(f"{NAMESPACE}.stand-in", ""),
        size=sum(step["Size"] for step in history),
        layers=layers_of(image.attrs["RootFS"]["Layers"], history),
        versions=_versions(labels),
        lock=inside["lock"],
        series=series_digest(series),
        patches=tuple(labels.get(f"{NAMESPACE}.patches", "").split()),
        proofs=proofs_of(series, proofs),
        architectures={name: tuple(names) for name, names in inside["architectures"].items()},
        suites={
            name: Suite(run.outcome, run.passed, run.failed, run.skipped, run.seconds)
            for name, run in found.items()
        },
    )


def _versions(labels: Mapping[str, str]) -> dict[str, str]:
    prefix = f"{NAMESPACE}.version."
    return {name.removeprefix(prefix): text for name, text in labels.items() if name.startswith(prefix)}


def patched(series: Iterable[Series]) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """Each patched package with its label and its patches, as an image names them."""
    return [(s.package, s.version, s.label, tuple(p.name for p in s.patches)) for s in series]


def _named(manifest: Mapping[str, Any]) -> tuple[str, str, str, tuple[str, ...]]:
    names = tuple(patch["name"] for patch in manifest["patches"])
    return manifest["package"], manifest["version"], manifest["label"], names


def _repatched(series: Iterable[Series], revision: str) -> bool:
    """Whether ``series`` changed since the commit that an image was built from, if that commit is known."""
    folders = [f"patches/{one.package}/{one.version}" for one in series]
    if not folders:  # git would compare the whole tree
        return False
    command = ["git", "diff", "--quiet", revision.removesuffix(records.DIRTY), "--", *folders]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 1
