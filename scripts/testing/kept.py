"""The tested image of a cell keeps a tag of its own, so that no build of the cell removes it.

The tag moves to another image once that has passed every suite that this one passed on this machine.
"""

from pathlib import Path

import docker
import docker.errors
import msgspec

from scripts.images.build import remove_unnamed
from scripts.matrix.load import Cell
from scripts.testing.credit import SHARED
from scripts.testing.records import Record, decode

KEPT = "-tested"  # appended to the cell's tag


def keep(client: docker.DockerClient, cell: Cell, record: Record | None, shared: Path = SHARED) -> None:
    """Tag the image of a passed suite as the tested one of its cell, if it is as well tested as that."""
    if record is None or record.outcome != "passed":
        return
    name = cell.tag + KEPT
    try:
        kept = str(client.images.get(name).id)
    except docker.errors.ImageNotFound:
        kept = ""
    if record.image == kept or suites_passed(cell, kept, shared) - suites_passed(cell, record.image, shared):
        return
    client.images.get(record.image).tag(name)
    if kept:
        remove_unnamed(client, [kept])


def suites_passed(cell: Cell, image: str, shared: Path = SHARED) -> set[str]:
    """Return the suites that passed on an image of a cell on this machine, in any checkout."""
    found = set()
    for file in (shared / cell.id).glob("*/*.json"):
        try:
            record = decode(file.read_bytes(), Record)
        except (OSError, msgspec.DecodeError):  # another checkout may be older, and its records others
            continue
        if (record.image, record.outcome) == (image, "passed"):
            found.add(record.suite)
    return found
