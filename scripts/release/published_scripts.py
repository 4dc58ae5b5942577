"""The table of OpenRLHF's published scripts, from the data of the tests that run them."""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.paths import ROOT

FOLDER = ROOT / "tests" / "cluster" / "published"
TRAINED = "0.11.2"  # the release of the default image, in which the tests also train
COLUMNS = ("script", "OpenRLHF", "command", "outcome")


def rows(folder: Path = FOLDER) -> list[tuple[str, ...]]:
    """Return a row for each command, in the order of `COLUMNS`, the newest release first."""
    found: list[tuple[str, ...]] = []
    for file in sorted(folder.glob("openrlhf-*.toml"), reverse=True, key=_release):
        release = file.stem.removeprefix("openrlhf-")
        for command in tomllib.loads(file.read_text(encoding="utf-8"))["command"]:
            module = command["module"].rpartition(".")[2]
            found.append((command["name"], release, module, "; ".join(_outcome(command, release))))
    return found


def _release(file: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in file.stem.removeprefix("openrlhf-").split("."))


def _outcome(command: Mapping[str, Any], release: str) -> Iterator[str]:
    """Yield what the tests require of a command, as published and made small."""
    if command.get("renamed"):
        yield "`plan` names the successor of a renamed flag"
    if reason := command.get("unsupported"):
        yield f"`plan` refuses it: {reason}"
    elif reason := command.get("too_large"):
        yield f"`plan`, two nodes of eight GPUs of 80 GiB: {reason}"
    else:
        yield "`plan` accepts it"
    if release != TRAINED:
        return
    reason = command.get("untested")
    refused = " without what is refused" if command.get("unsupported") else ""
    yield f"not trained: {reason}" if reason else f"made small{refused}, it takes two steps"
