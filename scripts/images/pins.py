"""The requirements of layers: which wheel or source distribution each pin selects, by its hashes."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from scripts.digests import sha256_file
from scripts.locks import lockfile
from scripts.matrix.load import Cell

TOP = ("openrlhf", "rlhf-stack")  # what is changed most often: a change installs nothing else again


def layers_with(wheels: Iterable[Path], layers: Mapping[str, str]) -> dict[str, str]:
    """Return the requirements of layers with patched ``wheels``, those of `TOP` in the layer ``stack``."""
    replacements = dict(pinned(wheel) for wheel in wheels)
    top = {pin: block for pin, block in replacements.items() if pin.split("==")[0] in TOP}
    texts = {name: repin(text, replacements | dict.fromkeys(top, "")) for name, text in layers.items()}
    return {**texts, "stack": "".join(top.values())}


def repin(requirements: str, replacements: Mapping[str, str]) -> str:
    """Replace pins of a layer's requirements; ``replacements`` maps ``name==version`` to a block or ""."""
    blocks = lockfile.blocks(requirements)
    return "".join(replacements.get(block.split()[0], block) for block in blocks)


def pinned(wheel: Path) -> tuple[str, str]:
    """Return the pin that a patched wheel replaces, and the block that requires exactly this wheel."""
    name, version = wheel.name.split("-")[:2]
    name = name.replace("_", "-")
    block = f"{name}=={version} \\\n    --hash=sha256:{sha256_file(wheel)}\n"
    return f"{name}=={version.split('+stack')[0]}", block


def local_wheels(requirements: str, folders: Iterable[Path]) -> list[Path]:
    """Return the wheels in folders of this machine that ``requirements`` name by hash."""
    folders, found = list(folders), []
    for block in lockfile.blocks(requirements):
        name = block.split("==")[0].replace("-", "_").lower()
        for wheel in (wheel for folder in folders for wheel in sorted(folder.glob("*.whl"))):
            if wheel.name.lower().startswith(f"{name}-") and sha256_file(wheel) in block:
                found.append(wheel)
    return found


def source_pin(cell: Cell, package: str, lock_text: str) -> str:
    """Return the hashed pin of the source distribution that a recipe builds, from the lock or an option."""
    for option in cell.optional:
        if option.name == package:
            return f"{option.name}=={option.version} \\\n    --hash=sha256:{option.sha256}\n"
    pin = f"{package}=={cell.versions[package]}"
    return next(block for block in lockfile.blocks(lock_text) if block.split()[0] == pin)
