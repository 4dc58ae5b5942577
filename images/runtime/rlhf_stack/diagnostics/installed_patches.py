"""Whether the patches that this distribution was built with are in the packages that are installed.

``patched.json`` beside this file is written when the wheels are made: every patched package, and for every
patch the files it changes with their checksums before and after. ``rlhf-stack patches`` compares.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.resources import files
from pathlib import Path
from typing import Any

from rlhf_stack.telemetry.logging import warn

PRESENT, MISSING, ALTERED = "present", "missing", "altered"
RESOURCE = "patched.json"
MEND = "reinstall the packages of this image, or start from the image again"
WORST = (PRESENT, MISSING, ALTERED)


@dataclass(frozen=True)
class Report:
    """One patch: ``state`` is "present", "missing" or "altered"; ``why`` is empty if it is present."""

    package: str
    patch: str
    title: str
    state: str
    why: str


def examine(manifests: Sequence[dict[str, Any]], checksum: Callable[[str, str], str | None]) -> list[Report]:
    """The state of each patch in ``manifests``, in order.

    ``checksum`` gives the sha256 of a file of a package as it is now, or None if there is none.
    """
    reports = []
    for manifest in manifests:
        package, chains = str(manifest["package"]), _chains(manifest)
        current = {path: checksum(package, path) for path in chains}
        for number, patch in enumerate(manifest["patches"]):
            states = [_state(chains[f["path"]], number, current[f["path"]]) for f in patch["files"]]
            state = max(states, key=WORST.index)
            why = ", ".join(
                f["path"] for f, s in zip(patch["files"], states, strict=True) if s == state != PRESENT
            )
            reports.append(Report(package, patch["name"], patch["title"], state, why))
    return reports


def expected() -> list[dict[str, Any]]:
    """The manifests that this build of rlhf_stack came with; none if it was not built with patched wheels."""
    resource = files("rlhf_stack") / RESOURCE
    if not resource.is_file():
        return []
    found: list[dict[str, Any]] = json.loads(resource.read_text(encoding="utf-8"))
    return found


def known(manifests: Sequence[dict[str, Any]], versions: Mapping[str, str]) -> set[str]:
    """The patches, by `slug`, that ``versions`` say they carry by their local version, such as "+stack.1"."""
    return {
        slug(patch["name"])
        for manifest in manifests
        if versions.get(str(manifest["package"])) == f"{manifest['version']}+{manifest['label']}"
        for patch in manifest["patches"]
    }


def slug(patch: str) -> str:
    """The name of a patch without its number, which differs between versions of a package."""
    return patch.split("-", 1)[1].removesuffix(".patch")


def installed_checksum(package: str, path: str) -> str | None:
    """The sha256 of ``path`` (relative to site-packages) as ``package`` has it on disk."""
    try:
        found = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError:
        return None
    return hashlib.sha256(found.read_bytes()).hexdigest() if found.is_file() else None


def installed_version(package: str) -> str:
    """The version that is installed, for people."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def changes() -> list[str]:
    """A line for each package that is not as this distribution patched it: replaced, or edited."""
    lines = []
    manifests = expected()
    reports = examine(manifests, installed_checksum)
    for manifest in manifests:
        package = str(manifest["package"])
        lost = [report for report in reports if report.package == package and report.state != PRESENT]
        if lost:
            lines.append(
                f"{package} {installed_version(package)} is not this image's {manifest['version']}+"
                f"{manifest['label']}: {len(lost)} of {len(manifest['patches'])} patches are not in it "
                f"({lost[0].patch}, ...), so what they cure is back; {MEND} (rlhf-stack patches shows all)"
            )
    return lines


def warn_of_changes() -> None:
    """Warn in the log of a run of each package that is not as this distribution patched it."""
    for line in changes():
        warn(line)


def _chains(manifest: dict[str, Any]) -> dict[str, list[tuple[int, str, str]]]:
    """For each file the patches that change it, in order: number, checksum before, checksum after."""
    chains: dict[str, list[tuple[int, str, str]]] = {}
    for number, patch in enumerate(manifest["patches"]):
        for file in patch["files"]:
            chains.setdefault(file["path"], []).append((number, file["before"], file["after"]))
    return chains


def _state(chain: list[tuple[int, str, str]], number: int, current: str | None) -> str:
    """The state of patch ``number`` in one file, whose checksum is ``current``."""
    if current is None:
        return MISSING
    contents = [chain[0][1], *(after for _, _, after in chain)]
    if current not in contents:
        return ALTERED
    applied = contents.index(current)
    position = [changed for changed, _, _ in chain].index(number)
    return PRESENT if position < applied else MISSING
