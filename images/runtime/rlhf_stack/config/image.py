"""What image this process runs in: its release, its cell and a digest of what is installed."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from rlhf_stack import __version__

ABOUT = Path("/etc/rlhf-stack")
CELL, CONTENTS = "cell.json", ("cell.json", "debian.txt", "lock.txt")
DIGITS = 12


def description(folder: Path = ABOUT) -> str:
    """Return one line with release, cell and digest; outside of an image, with the version of this package.

    No image contains its own digest. This one is of the installed packages and settings, so that equal lines
    mean equal contents; `docker images --digests` has the digest of a pulled image.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        cell = json.loads((folder / CELL).read_text(encoding="utf-8"))
        digest = hashlib.sha256(b"".join((folder / name).read_bytes() for name in CONTENTS)).hexdigest()
        release, name = str(cell["release"]), str(cell["id"])
        return (
            f"rlhf-stack {release}, cell {name}, contents sha256:{digest[:DIGITS]} (rlhf_stack {__version__})"
        )
    return f"rlhf-stack {__version__}, not in an image of the stack"
