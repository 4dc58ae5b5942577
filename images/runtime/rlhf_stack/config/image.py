"""What image this process runs in: its release, its cell and the digest of its inputs."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_stack import __version__
from rlhf_stack.config import env_vars

ABOUT = Path("/etc/rlhf-stack")
CELL = "cell.json"
DIGITS = 12


@dataclass(frozen=True)
class About:
    """An image by its cell, its release, and the digest of the inputs of its build; all "" outside of one."""

    cell: str = ""
    release: str = ""
    inputs: str = ""


def about(folder: Path = ABOUT) -> About:
    """What image this process runs in."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        cell = _cell(folder)
        return About(str(cell["id"]), str(cell["release"]), os.environ.get(env_vars.INPUTS, ""))
    return About()


def env_defaults(folder: Path = ABOUT) -> dict[str, str]:
    """Return the env defaults of this image, by name; nothing outside of one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return {item["name"]: item["value"] for item in _cell(folder)["env"]}
    return {}


def profile_values(profile: str, folder: Path = ABOUT) -> dict[str, str]:
    """Return the variables of a profile of this image's accelerator, by name; nothing for an unknown one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        profiles = {one["name"]: one["env"] for one in _cell(folder)["accelerator"]["profiles"]}
        return {item["name"]: item["value"] for item in profiles[profile]}
    return {}


def stand_in_defaults(folder: Path = ABOUT) -> dict[str, str]:
    """Return the env defaults of a stand-in, which may name files of the cell that it lacks; else nothing."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return env_defaults(folder) if _cell(folder)["stand_in"] else {}
    return {}


def description(folder: Path = ABOUT) -> str:
    """Return one line with release, cell and inputs digest; outside of an image, with this package's version.

    No image contains its own digest. That of its inputs is in its label and in the catalogue too.
    """
    found = about(folder)
    if not found.cell:
        return f"rlhf-stack {__version__}, not in an image of the stack"
    digest = f"sha256:{found.inputs[:DIGITS]}" if found.inputs else f"unknown, {env_vars.INPUTS} is not set"
    return f"rlhf-stack {found.release}, cell {found.cell}, inputs {digest} (rlhf_stack {__version__})"


def _cell(folder: Path) -> Any:
    """Read the file that describes the cell of an image."""
    return json.loads((folder / CELL).read_text(encoding="utf-8"))
