"""Push the tested images of cells to a registry.

Each image is pushed under an immutable tag ``<release>-<cell>``, then under the moving alias ``<cell>``.
There is no ``latest``: it would move users between accelerators and versions. Everything is checked before
the first push. An interrupted run can be repeated: existing tags are not pushed again, and no alias moves
before every immutable tag is verified.
"""

import datetime
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
from docker.models.images import Image
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn

from scripts.docker.client import connect
from scripts.docker.registry import Remote, explain_refusal, host_of, inspect_remote, repository
from scripts.errors import UserError
from scripts.git import DIRTY, require_clean_tree, revision
from scripts.images.inputs import INPUTS, NAMESPACE, REVISION, digest_for
from scripts.locking import exclusive_lock
from scripts.matrix.load import Cell
from scripts.matrix.model import PLAIN_INDEX
from scripts.paths import ROOT
from scripts.release import catalogue, facts, requirements
from scripts.testing import records

DigestFor = Callable[[Cell], str]  # returns the digest of the inputs of a build now

PUSH_SECONDS = 600  # without an answer of Docker: a registry stores a large layer slowly


@dataclass(frozen=True)
class Item:
    """A cell to publish, with its image on this machine."""

    cell: Cell
    image: Image

    @property
    def immutable(self) -> str:
        """The tag that never moves."""
        return f"{self.cell.release}-{self.cell.id}"


@dataclass(frozen=True)
class Row:
    """The result for a tag; ``moved`` is the number of bytes pushed, None if the tag existed already."""

    reference: str
    digest: str
    moved: int | None


class Upload:
    """The progress of a push, from Docker's events."""

    def __init__(self) -> None:
        self.digest = ""
        self.pushed: list[str] = []
        self._layers: dict[str, tuple[int, int]] = {}

    def take(self, event: Mapping[str, Any]) -> None:
        """Process an event; `UserError` with the registry's message if it is an error."""
        if "error" in event:
            raise UserError(str(event["error"]))
        layer, status = str(event.get("id", "")), event.get("status")
        detail = event.get("progressDetail") or {}
        if status == "Pushing" and detail.get("total"):
            total = int(detail["total"])
            self._layers[layer] = (min(int(detail.get("current", 0)), total), total)
        elif status == "Pushed":
            self.pushed.append(layer)
            _, total = self._layers.get(layer, (0, 0))
            self._layers[layer] = (total, total)
        self.digest = (event.get("aux") or {}).get("Digest", self.digest)

    @property
    def progress(self) -> tuple[int, int]:
        """Unpacked bytes sent and in total, of the layers that the registry did not have."""
        return sum(now for now, _ in self._layers.values()), sum(total for _, total in self._layers.values())


def refusals(cell: Cell, image: Image, roots: Sequence[Path] = records.ROOTS) -> list[str]:
    """Return why an image is not published as ``cell``, a line each; ``roots`` have the test records.

    Nothing is laid out for it: whether the inputs are still those of the checkout is a question of `changed`.
    """
    if wrong := _wrong_image(cell, image.labels):
        return [f"{cell.id} {wrong}"]
    history = records.history(cell.id, roots)
    unproved = requirements.suites(cell, records.subject(cell, image), history, roots[0])
    return [f"{cell.id}: {reason}" for reason in (*requirements.dates(cell, _today()), *unproved)]


def changed(items: Iterable[Item], digest_for: DigestFor = digest_for) -> list[str]:
    """Return a line for each image whose inputs are not those of a build now, which is laid out for this."""
    return [
        f"{item.cell.id} was built from {item.image.labels[REVISION][: records.DIGITS]}, and its inputs have "
        "changed since: build and test it"
        for item in items
        if item.image.labels[INPUTS] != digest_for(item.cell)
    ]


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def _wrong_image(cell: Cell, labels: Mapping[str, str]) -> str | None:
    """Return why the labels disagree with the cell, or None."""
    if labels.get(f"{NAMESPACE}.cell") != cell.id:
        return "is the tag of another image: build the cell"
    if labels.get(f"{NAMESPACE}.stand-in"):
        how = "with PyTorch's CPU index" if cell.id.endswith(PLAIN_INDEX) else "without --stand-in"
        return f"is a stand-in for tests: build the cell itself, {how}, where its sources are available"
    version = labels.get("org.opencontainers.image.version", "")
    if version != f"{cell.release}-{cell.id}":
        return f"was built for another release ({version}): rebuild it"
    if labels.get(REVISION, DIRTY).endswith(DIRTY):
        return "was built from a dirty tree: commit, build and test it"
    if not labels.get(INPUTS):
        return "was built without a digest of its inputs: rebuild it"
    return None


def overwrites(reference: str, remote: Remote | None, image: str) -> list[str]:
    """Return a line if pushing ``image`` would overwrite an immutable tag."""
    if remote is None or remote.holds(image):
        return []
    return [
        f"{reference} exists with other content ({remote.digest}) and is immutable: "
        "increase `release` in matrix.yaml"
    ]


def moved(pushed: Iterable[str], diff_ids: Sequence[str], remote: Remote) -> int:
    """Return the packed bytes of pushed layers; Docker abbreviates the digest of either form of a layer."""
    sizes = {digest[7:19]: size for digest, size in remote.layers}
    sizes |= {diff[7:19]: size for diff, (_, size) in zip(diff_ids, remote.layers, strict=False)}
    return sum(sizes.get(layer, 0) for layer in set(pushed))


def push(client: docker.DockerClient, image: Image, repo: str, tag: str, console: Console) -> Row:
    """Push one tag and verify it on the registry; `UserError` gives the cause of a failure.

    A local tag of the same name, such as that of a pulled image, is restored.
    """
    reference = f"{repo}:{tag}"
    try:
        earlier = client.images.get(reference)
    except docker.errors.ImageNotFound:
        earlier = None
    image.tag(repo, tag)
    try:
        upload = _upload(client, repo, tag, console)
    except UserError as problem:
        raise UserError(explain_refusal(str(problem), repo)) from None
    finally:
        if earlier:
            earlier.tag(repo, tag)
        else:
            client.images.remove(reference, noprune=True)
    remote = inspect_remote(client, reference)
    if remote is None or remote.digest != upload.digest or not remote.holds(str(image.id)):
        raise UserError(f"{reference}: the registry does not have the pushed image; run this again")
    return Row(reference, remote.digest, moved(upload.pushed, image.attrs["RootFS"]["Layers"], remote))


def _upload(client: docker.DockerClient, repo: str, tag: str, console: Console) -> Upload:
    upload = Upload()
    console.print(f"pushing {repo}:{tag}", soft_wrap=True)
    columns = SpinnerColumn(), BarColumn(), DownloadColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("unpacked", total=None)
        for event in client.api.push(repo, tag, stream=True, decode=True):
            upload.take(event)
            done, total = upload.progress
            progress.update(task, completed=done, total=total or None)
    return upload


def publish(client: docker.DockerClient, repo: str, items: Sequence[Item], console: Console) -> list[Row]:
    """Push missing tags of checked items: every immutable tag, then every alias."""
    rows = []
    for item in items:
        reference = f"{repo}:{item.immutable}"
        remote = inspect_remote(client, reference)
        if refused := overwrites(reference, remote, str(item.image.id)):
            raise UserError(refused[0])
        rows.append(
            Row(reference, remote.digest, None)
            if remote
            else push(client, item.image, repo, item.immutable, console)
        )
    for item in items:
        remote = inspect_remote(client, f"{repo}:{item.cell.id}")
        rows.append(
            Row(f"{repo}:{item.cell.id}", remote.digest, None)
            if remote and remote.holds(str(item.image.id))
            else push(client, item.image, repo, item.cell.id, console)
        )
    return rows


def collect(
    client: docker.DockerClient, repo: str, cells: Iterable[Cell], roots: Sequence[Path] = records.ROOTS
) -> tuple[list[Item], list[str]]:
    """Return the items to publish, and every reason not to; ``roots`` have the test records."""
    items, reasons = [], []
    for cell in cells:
        try:
            image = client.images.get(cell.tag)
        except docker.errors.ImageNotFound:
            reasons.append(f"{cell.tag} is not built")
            continue
        item = Item(cell, image)
        refused = refusals(cell, image, roots)
        if not refused:
            reference = f"{repo}:{item.immutable}"
            refused = overwrites(reference, inspect_remote(client, reference), str(image.id))
        items.append(item)
        reasons += refused
    return items, reasons


def untrue(items: Iterable[Item]) -> list[str]:
    """Return why this commit must not publish: its checks, and a catalogue that is not of these images."""
    commit = revision()
    reasons = requirements.checkout(commit, records.read(records.CHECKOUT, commit)) + catalogue.check(
        offline=True
    )
    known = facts.load([item.cell for item in items])
    for item in items:
        reasons += requirements.catalogued(item.cell, str(item.image.id), known)
    return reasons


def table(rows: Sequence[Row]) -> str:
    """Return tag, digest and bytes, one line per tag, with whole digests for copying."""
    width = max(len(row.reference) for row in rows)
    return "\n".join(
        f"{row.reference:<{width}}  {row.digest}  "
        + ("existed" if row.moved is None else f"{row.moved:,} bytes")
        for row in rows
    )


def publish_cells(repository_name: str, cells: Iterable[Cell]) -> int:
    """Check and push the images of cells; return 2, without pushing, if one is refused."""
    repo = repository(repository_name)
    require_clean_tree()
    client = connect(PUSH_SECONDS)
    with exclusive_lock(ROOT / "build" / "publish", f"publishing to {host_of(repo)}"):
        items, reasons = collect(client, repo, cells)
        reasons += untrue(items)
        reasons = reasons or changed(items)  # last: in a fresh clone it makes root filesystems
        if reasons:
            for reason in reasons:
                print(f"error: {reason}", file=sys.stderr)
            print("nothing was pushed", file=sys.stderr)
            return 2
        print(table(publish(client, repo, items, Console())))
    return 0
