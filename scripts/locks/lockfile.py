"""Read locks: the packages of a lock, and the layers of an image that they go to.

The lock of a cell is ``images/locks/<cell>.txt`` (every package with hashes), resolved from ``<cell>.in``.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from scripts.matrix.load import Cell
from scripts.paths import ROOT

LOCKS = ROOT / "images" / "locks"
HOST = ROOT / "scripts" / "requirements.txt"
SOURCE = "{}-source"  # name of a layer's packages that are built from source


@dataclass(frozen=True)
class Entry:
    """A package of a lock: its pin, the text that pip installs it from, and the packages that require it."""

    name: str
    version: str
    block: str
    via: frozenset[str]


def path(cell: Cell) -> Path:
    """Return the path of a cell's lock."""
    return LOCKS / f"{cell.lock}.txt"


def normal(name: str) -> str:
    """Return the normalized name of a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(text: str) -> tuple[Entry, ...]:
    """Return the packages of a lock, in its order."""
    return tuple(_entry(chunk) for chunk in re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:])


def versions(text: str) -> dict[str, str]:
    """Return the locked versions by package."""
    return {entry.name: entry.version for entry in parse(text)}


def blocks(text: str) -> list[str]:
    """Return the requirement of each package of a lock or layer, with its hashes and without comments."""
    return [entry.block for entry in parse(text)]


def layers(text: str, cell: Cell) -> dict[str, str]:
    """Return the requirements of each layer of ``cell``, bottom first, and of its `SOURCE` packages.

    A package goes to the lowest layer that needs it. A package that a layer names goes to that layer, with
    what only it needs: vLLM requires Ray and is below it. What only the cell requires goes to the top layer.
    The layers are disjoint, and together they are the lock.
    """
    entries = {entry.name: entry for entry in parse(text)}
    from_source = set(built(cell))
    parts: dict[str, list[str]] = {}
    placed: set[str] = set()
    roots = {layer.name: [distribution(cell, name) for name in layer.packages] for layer in cell.layers}
    waiting = {name for names in roots.values() for name in names}
    for layer in cell.layers:
        waiting -= set(roots[layer.name])
        needed = set(entries) if layer is cell.layers[-1] else closure(entries, roots[layer.name], waiting)
        parts[layer.name] = sorted(needed - placed - from_source)
        parts[SOURCE.format(layer.name)] = sorted((needed - placed) & from_source)
        placed |= needed
    return {name: "".join(entries[package].block for package in packages) for name, packages in parts.items()}


def distribution(cell: Cell, name: str) -> str:
    """Return the distribution of a headline package; other packages have the name that the matrix uses."""
    found = next((package.distribution for package in cell.packages if package.name == name), name)
    return normal(found)


def built(cell: Cell) -> tuple[str, ...]:
    """Return the distributions that are installed from source."""
    return tuple(distribution(cell, build.package) for build in cell.build_from_source if not build.recipe)


def closure(entries: dict[str, Entry], roots: Iterable[str], without: Iterable[str] = ()) -> set[str]:
    """Return ``roots`` and everything they require, except ``without`` and what only those require."""
    needed: set[str] = set()
    entries = {name: entry for name, entry in entries.items() if name not in set(without)}
    waiting = [root for root in roots if root in entries]
    while waiting:
        needed.add(name := waiting.pop())
        waiting += [
            entry.name for entry in entries.values() if name in entry.via and entry.name not in needed
        ]
    return needed


def _entry(chunk: str) -> Entry:
    lines = chunk.splitlines()
    code = [line for line in lines if not line.lstrip().startswith("#")]
    code = [line for line in code if line.strip()]
    code[-1] = code[-1].removesuffix("\\").rstrip()
    pin = re.match(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)", chunk)
    if pin is None:
        raise ValueError(f"not a pinned requirement: {lines[0]!r}")
    notes = (
        line.strip().removeprefix("#").strip().removeprefix("via").strip() for line in lines if "#" in line
    )
    via = frozenset(normal(note) for note in notes if re.fullmatch(r"[A-Za-z0-9._-]+", note))
    return Entry(normal(pin["name"]), pin["version"], "\n".join(code) + "\n", via)
