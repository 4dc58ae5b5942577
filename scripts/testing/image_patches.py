"""Whether an image has the patches of this checkout.

Suites in which patched packages have marks (`in_image.MARKED`) run the checkout's patched files in the place
of the image's. On an image with other patches, their result would be about files that it does not have.
"""

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import docker
import docker.errors

from scripts.digests import sha256
from scripts.errors import UserError
from scripts.images.wheels import EXPECTED
from scripts.locks import lockfile
from scripts.matrix.load import Cell
from scripts.patches.apply import apply
from scripts.patches.leave_out import files_to_patch
from scripts.patches.pristine import fetch_pristine, locked_hashes
from scripts.patches.series import Series, series_of
from scripts.testing.cluster import LABEL, owner_label, remove_on_exit


def require_same(client: docker.DockerClient, cell: Cell, image: str) -> None:
    """Raise `UserError` unless the image with this id has the patched files of this checkout's cell."""
    lock = lockfile.path(cell).read_text(encoding="utf-8")
    ours: dict[str, str] = {}
    for series in series_of(cell):
        hashes = locked_hashes(series.package, series.version, lock)
        ours |= patched(fetch_pristine(series.package, series.version, hashes), series)
    if different := other_patches(manifests(client, cell, image), ours):
        more = f" and {len(different) - 1} more" if different[1:] else ""
        raise UserError(
            f"the image has other patches than this checkout ({different[0]}{more}): rebuild it with "
            f"bash scripts/nox.sh -s build -- {cell.id}"
        )


def other_patches(found: Iterable[Mapping[str, Any]], ours: Mapping[str, str]) -> list[str]:
    """Return the files that the ``found`` manifests of an image and ``ours`` (`patched`) do not share."""
    theirs = {
        file["path"]: file["after"]
        for manifest in found
        for patch in manifest["patches"]
        for file in patch["files"]
    }
    return sorted({path for path, _ in theirs.items() ^ ours.items()})


def patched(wheel: Path, series: Series) -> dict[str, str]:
    """Return the sha256 of each file of a released wheel that a series changes, with all its patches."""
    files = files_to_patch(wheel, series)
    for patch in series.patches:
        apply(files, "", patch)
    return {path: sha256(file.content) for path, file in files.items()}


def manifests(client: docker.DockerClient, cell: Cell, image: str) -> list[dict[str, Any]]:
    """Return the manifests of an image's patched packages, none if it has no such file."""
    path = f"/opt/venv/lib/python{cell.python}/site-packages/rlhf_stack/{EXPECTED}"
    container = client.containers.create(image, labels={LABEL: owner_label()})
    with remove_on_exit([container]):
        try:
            chunks, _ = container.get_archive(path)
        except docker.errors.NotFound:
            return []
        packed = b"".join(chunks)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        file = archive.extractfile(EXPECTED)
        found: list[dict[str, Any]] = json.load(file) if file else []
    return found
