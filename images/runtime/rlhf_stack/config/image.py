"""What image this process runs in: its release, its cell and a digest of what is installed."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf_stack import __version__
from rlhf_stack.config import env_vars

ABOUT = Path("/etc/rlhf-stack")
CELL, CONTENTS = "cell.json", ("cell.json", "debian.txt", "lock.txt")
DIGITS = 12


@dataclass(frozen=True)
class About:
    """An image by its cell, its release, and the digest of the inputs of its build; all "" outside of one."""

    cell: str = ""
    release: str = ""
    inputs: str = ""


def about() -> About:
    """What image this process runs in."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        cell = json.loads((ABOUT / CELL).read_text(encoding="utf-8"))
        return About(str(cell["id"]), str(cell["release"]), os.environ.get(env_vars.INPUTS, ""))
    return About()


def stand_in_defaults(folder: Path = ABOUT) -> dict[str, str]:
    """Return the env defaults of a stand-in, which may name files of the cell that it lacks; else nothing."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        cell = json.loads((folder / CELL).read_text(encoding="utf-8"))
        return {item["name"]: item["value"] for item in cell["env"]} if cell["stand_in"] else {}
    return {}


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
