"""Checks whether the installed packages contain the patches of this distribution.

The build writes ``patched.json`` in ``rlhf_stack``: every patched package, and for every patch the changed
files with their checksums before and after. Installed files are compared with it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.resources import files
from pathlib import Path
from typing import Any

from rlhf_stack.telemetry import run_log

PRESENT, MISSING, ALTERED = "present", "missing", "altered"
RESOURCE = "patched.json"
REMEDY = "reinstall the packages of this image, or start again from the image"
WORST = (PRESENT, MISSING, ALTERED)


@dataclass(frozen=True)
class PatchStatus:
    """A patch; ``state`` is "present", "missing" or "altered", ``why`` names the files unless present."""

    package: str
    patch: str
    title: str
    state: str
    why: str


def patch_statuses(
    found: Sequence[dict[str, Any]], checksum: Callable[[str, str], str | None]
) -> list[PatchStatus]:
    """The state of each patch in the manifests ``found``, in order.

    ``checksum`` returns the current sha256 of a file of a package, or None if the file does not exist.
    """
    reports = []
    for manifest in found:
        package, chains = str(manifest["package"]), _chains(manifest)
        current = {path: checksum(package, path) for path in chains}
        for number, patch in enumerate(manifest["patches"]):
            states = [_state(chains[f["path"]], number, current[f["path"]]) for f in patch["files"]]
            state = max(states, key=WORST.index)
            why = ", ".join(
                f["path"] for f, s in zip(patch["files"], states, strict=True) if s == state != PRESENT
            )
            reports.append(PatchStatus(package, patch["name"], patch["title"], state, why))
    return reports


def manifests() -> list[dict[str, Any]]:
    """The manifests of this build of rlhf_stack; empty if it was built without patched wheels."""
    resource = files("rlhf_stack") / RESOURCE
    if not resource.is_file():
        return []
    found: list[dict[str, Any]] = json.loads(resource.read_text(encoding="utf-8"))
    return found


def patches_in_versions(found: Sequence[dict[str, Any]], versions: Mapping[str, str]) -> set[str]:
    """The patches, by `slug`, that the local versions in ``versions``, such as "+stack.1", indicate."""
    return {
        slug(patch["name"])
        for manifest in found
        if versions.get(str(manifest["package"])) == f"{manifest['version']}+{manifest['label']}"
        for patch in manifest["patches"]
    }


def slug(patch: str) -> str:
    """The name of a patch without its number, which differs between releases of a package."""
    return patch.split("-", 1)[1].removesuffix(".patch")


def installed_checksum(package: str, path: str) -> str | None:
    """The sha256 of the installed file ``path`` (relative to site-packages) of ``package``, or None."""
    try:
        found = Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError:
        return None
    return hashlib.sha256(found.read_bytes()).hexdigest() if found.is_file() else None


def installed_version(package: str) -> str:
    """The installed version of ``package``, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def changed_packages() -> list[str]:
    """One line for each package that differs from the patched one: replaced or edited."""
    lines = []
    found = manifests()
    reports = patch_statuses(found, installed_checksum)
    for manifest in found:
        package = str(manifest["package"])
        lost = [report for report in reports if report.package == package and report.state != PRESENT]
        if lost:
            lines.append(
                f"{package} {installed_version(package)} is not this image's {manifest['version']}+"
                f"{manifest['label']}: {len(lost)} of {len(manifest['patches'])} patches are not present "
                f"({lost[0].patch}, ...), so their fixes are missing; {REMEDY} (see rlhf-stack patches)"
            )
    return lines


def warn_of_replaced_packages() -> None:
    """Log a warning for each package that differs from the patched one."""
    for line in changed_packages():
        run_log.warning(line)


def _chains(manifest: dict[str, Any]) -> dict[str, list[tuple[int, str, str]]]:
    """For each file, the patches that change it in order: number, checksum before, checksum after."""
    chains: dict[str, list[tuple[int, str, str]]] = {}
    for number, patch in enumerate(manifest["patches"]):
        for file in patch["files"]:
            chains.setdefault(file["path"], []).append((number, file["before"], file["after"]))
    return chains


def _state(chain: list[tuple[int, str, str]], number: int, current: str | None) -> str:
    """The state of patch ``number`` in a file whose checksum is ``current``."""
    if current is None:
        return MISSING
    contents = [chain[0][1], *(after for _, _, after in chain)]
    if current not in contents:
        return ALTERED
    applied = contents.index(current)
    position = [changed for changed, _, _ in chain].index(number)
    return PRESENT if position < applied else MISSING
