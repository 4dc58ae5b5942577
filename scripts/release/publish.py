"""Push the images of cells to a registry, where every one of them was tested.

``python -m scripts.release.publish REGISTRY/REPO [--cell CELL ...]``: for each cell an immutable tag
``<release>-<cell>``, then the moving alias ``<cell>``. There is no ``latest``: it would move a user from one
accelerator or version to another. Everything is checked before anything is pushed. Interrupted, it is run
again: what is there already is not pushed twice, and no alias moves before every immutable tag is verified.
"""

import argparse
import subprocess
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

from scripts.docker.client import connect, with_docker_errors
from scripts.docker.registry import Remote, explain_refusal, host_of, inspect_remote, repository
from scripts.errors import UserError, run
from scripts.images.inputs import INPUTS, NAMESPACE, REVISION, digest_for
from scripts.locking import exclusive_lock
from scripts.matrix.load import Cell, expand, find, load
from scripts.paths import ROOT
from scripts.testing import records

Given = Callable[[Cell], str]  # the digest of what a build of a cell is given

PUSH_SECONDS = 600  # without a word from the engine: a registry takes its time to store a big layer


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
    """What became of a tag; ``moved`` are the bytes that the registry got, None if it had the tag already."""

    reference: str
    digest: str
    moved: int | None


class Upload:
    """What the engine tells of a push, event by event."""

    def __init__(self) -> None:
        self.digest = ""
        self.pushed: list[str] = []
        self._layers: dict[str, tuple[int, int]] = {}

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event; a `UserError` with the registry's words if it is an error."""
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
        """Bytes sent and to be sent, unpacked, of the layers that the registry did not have."""
        return sum(now for now, _ in self._layers.values()), sum(total for _, total in self._layers.values())


def refusals(
    cell: Cell, labels: Mapping[str, str], found: Mapping[str, records.Record], given: Given
) -> list[str]:
    """Why the image with ``labels`` is not published as ``cell``, a line each; empty if it is.

    ``found`` are its test records, and ``given`` says what a build of the cell would be given now.
    """
    if wrong := _wrong_image(cell, labels) or _wrong_inputs(cell, labels, given):
        return [f"{cell.id} {wrong}"]
    return [f"{cell.id}: {reason}: run its tests" for reason in records.missing_records(cell, found)]


def _wrong_image(cell: Cell, labels: Mapping[str, str]) -> str | None:
    """Why an image is not the one to publish, by what it says that it is."""
    if labels.get(f"{NAMESPACE}.cell") != cell.id:
        return "is the tag of another image: build the cell"
    if labels.get(f"{NAMESPACE}.stand-in"):
        return "is a stand-in, made for tests: build it without --stand-in, where that can be done"
    made = labels.get("org.opencontainers.image.version", "")
    if made != f"{cell.release}-{cell.id}":
        return f"was built for another release ({made}): build it again"
    return None


def _wrong_inputs(cell: Cell, labels: Mapping[str, str], given: Given) -> str | None:
    """Why an image is not what a build would make now."""
    revision = labels.get(REVISION, "")
    if revision.endswith(records.DIRTY):
        return "was built from a dirty tree: commit, build and test it"
    if labels.get(INPUTS) != given(cell):
        since = revision[:12] or "no commit"
        return f"was built from {since}, a build is given other files now: build and test it"
    return None


def require_clean_tree(root: Path = ROOT) -> None:
    """A `UserError` unless all files are committed."""
    command = ["git", "status", "--porcelain", "-z"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError("what is published must be in git, and this is no git checkout")
    if changed := [entry[3:] for entry in done.stdout.split("\0") if entry]:
        raise UserError(f"the tree is dirty ({changed[0]}): commit, then build and test")


def overwrites(reference: str, there: Remote | None, image: str) -> list[str]:
    """Why an immutable tag would be overwritten, if it would."""
    if there is None or there.holds(image):
        return []
    return [
        f"{reference} is there already with other content ({there.digest}): it is immutable; "
        "raise `release` in matrix.yaml"
    ]


def moved(pushed: Iterable[str], diff_ids: Sequence[str], there: Remote) -> int:
    """Packed bytes of the layers ``pushed``, which engines name by content, packed or not, cut short."""
    sizes = {digest[7:19]: size for digest, size in there.layers}
    sizes |= {diff[7:19]: size for diff, (_, size) in zip(diff_ids, there.layers, strict=False)}
    return sum(sizes.get(layer, 0) for layer in set(pushed))


def push(client: docker.DockerClient, image: Image, repo: str, tag: str, console: Console) -> Row:
    """Push one tag, and look that the registry has it; a `UserError` says what hindered it."""
    reference = f"{repo}:{tag}"
    known = reference in image.tags
    image.tag(repo, tag)
    try:
        upload = _upload(client, repo, tag, console)
    except UserError as problem:
        raise UserError(explain_refusal(str(problem), repo)) from None
    finally:
        if not known:
            client.images.remove(reference, noprune=True)
    there = inspect_remote(client, reference)
    if there is None or there.digest != upload.digest or not there.holds(str(image.id)):
        raise UserError(f"{reference}: the registry does not have what was pushed; run this again")
    return Row(reference, there.digest, moved(upload.pushed, image.attrs["RootFS"]["Layers"], there))


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
    """Push what is missing: every immutable tag, then every alias. ``items`` have been checked."""
    rows = []
    for item in items:
        reference = f"{repo}:{item.immutable}"
        there = inspect_remote(client, reference)
        if refused := overwrites(reference, there, str(item.image.id)):
            raise UserError(refused[0])
        rows.append(
            Row(reference, there.digest, None)
            if there
            else push(client, item.image, repo, item.immutable, console)
        )
    for item in items:
        there = inspect_remote(client, f"{repo}:{item.cell.id}")
        rows.append(
            Row(f"{repo}:{item.cell.id}", there.digest, None)
            if there and there.holds(str(item.image.id))
            else push(client, item.image, repo, item.cell.id, console)
        )
    return rows


def gather(
    client: docker.DockerClient,
    repo: str,
    cells: Iterable[Cell],
    kept: Path = records.RECORDS,
    given: Given = digest_for,
) -> tuple[list[Item], list[str]]:
    """The items to publish, and every reason not to; ``kept`` is where the test records are."""
    items, reasons = [], []
    for cell in cells:
        try:
            image = client.images.get(cell.tag)
        except docker.errors.ImageNotFound:
            reasons.append(f"{cell.tag} is not built")
            continue
        item = Item(cell, image)
        refused = refusals(cell, image.labels, records.read(str(image.id), kept), given)
        if not refused:
            reference = f"{repo}:{item.immutable}"
            refused = overwrites(reference, inspect_remote(client, reference), str(image.id))
        items.append(item)
        reasons += refused
    return items, reasons


def table(rows: Sequence[Row]) -> str:
    """Tag, digest and bytes, a line each, never cut short: a digest is there to be copied."""
    width = max(len(row.reference) for row in rows)
    told = ("was there" if row.moved is None else f"{row.moved:,} bytes" for row in rows)
    return "\n".join(
        f"{row.reference:<{width}}  {row.digest}  {text}" for row, text in zip(rows, told, strict=True)
    )


def main() -> int:
    """The command line; exit code 2 when something is refused."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.release.publish", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("repository", metavar="REGISTRY/REPO", help="such as ghcr.io/you/rlhf-stacks")
    parser.add_argument(
        "--cell", action="append", metavar="CELL", help="a cell id; all cells if none is given"
    )
    options = parser.parse_args()
    repo = repository(options.repository)
    matrix = load()
    cells = [find(matrix, name) for name in dict.fromkeys(options.cell)] if options.cell else expand(matrix)
    require_clean_tree()
    client = connect(PUSH_SECONDS)
    console = Console()
    with exclusive_lock(ROOT / "build" / "publish", f"publishing to {host_of(repo)}"):
        items, reasons = gather(client, repo, cells)
        if reasons:
            for reason in reasons:
                print(f"error: {reason}", file=sys.stderr)
            print("nothing was pushed", file=sys.stderr)
            return 2
        print(table(publish(client, repo, items, console)))
    return 0


if __name__ == "__main__":
    run(with_docker_errors(main))
