"""The lock of each cell: ``images/locks/<cell>.in`` (headline pins) and ``.txt`` (every package, hashed).

``python -m scripts lock [CELL ...]`` writes them, and ``scripts/requirements.txt`` for the host's own tools.
``--check`` writes nothing and fails when one is stale; ``--check --offline`` asks no index: it finds what was
edited by hand and what no longer follows from ``matrix.yaml``.
"""

import argparse
import hashlib
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.errors import UserError, run
from scripts.locks import preflight, resolver
from scripts.matrix.load import Cell, Matrix, expand, find, load
from scripts.paths import ROOT

LOCKS = ROOT / "images" / "locks"
HOST = ROOT / "scripts" / "requirements.txt"
PYPROJECT = ROOT / "pyproject.toml"
COMMAND = "python -m scripts lock"
SOURCE = "{}-source"
HEADER = "# Written by `{command}`. Input sha256: {source}. Content sha256: {content}.\n"


@dataclass(frozen=True)
class Entry:
    """One package of a lock: its pin, the text that pip installs it from, and which packages asked for it."""

    name: str
    version: str
    block: str
    via: frozenset[str]


@dataclass(frozen=True)
class Target:
    """A lock to be written: where, by which command, and from which question to the resolver."""

    path: Path
    command: str
    source: str
    question: resolver.Question


def path(cell: Cell) -> Path:
    """The lock of a cell."""
    return LOCKS / f"{cell.lock}.txt"


def normal(name: str) -> str:
    """The name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(text: str) -> tuple[Entry, ...]:
    """The packages of a lock, in its order."""
    return tuple(_entry(chunk) for chunk in re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:])


def blocks(text: str) -> list[str]:
    """Each package of a lock or a layer as pip takes it, its hashes with it, comments left out."""
    return [entry.block for entry in parse(text)]


def layers(text: str, cell: Cell) -> dict[str, str]:
    """The requirements of each layer of ``cell``, bottom first, and of its `SOURCE`: what is built for it.

    A package is in the lowest layer that needs it, but one that a layer names is in that layer, with what
    only it needs: vLLM asks for Ray, and is below it. What nothing asked for but the cell itself is in the
    highest. The layers share no package, and together they are the lock.
    """
    entries = {entry.name: entry for entry in parse(text)}
    built = {normal(name) for name in _built(cell)}
    parts: dict[str, list[str]] = {}
    placed: set[str] = set()
    roots = {
        layer.name: [normal(_distribution(cell, name)) for name in layer.packages] for layer in cell.layers
    }
    waiting = {name for names in roots.values() for name in names}
    for layer in cell.layers:
        waiting -= set(roots[layer.name])
        needed = set(entries) if layer is cell.layers[-1] else closure(entries, roots[layer.name], waiting)
        parts[layer.name] = sorted(needed - placed - built)
        parts[SOURCE.format(layer.name)] = sorted((needed - placed) & built)
        placed |= needed
    return {name: "".join(entries[package].block for package in packages) for name, packages in parts.items()}


def _built(cell: Cell) -> tuple[str, ...]:
    """The distributions that are installed from source."""
    return tuple(_distribution(cell, build.package) for build in cell.build_from_source if not build.recipe)


def _distribution(cell: Cell, name: str) -> str:
    """The distribution of a headline package; any other has the name that the matrix uses."""
    return next((package.distribution for package in cell.packages if package.name == name), name)


def closure(entries: dict[str, Entry], roots: Iterable[str], without: Iterable[str] = ()) -> set[str]:
    """The packages of ``roots`` and all that they ask for, directly or not, ``without`` some and theirs."""
    needed: set[str] = set()
    entries = {name: entry for name, entry in entries.items() if name not in set(without)}
    waiting = [root for root in roots if root in entries]
    while waiting:
        needed.add(name := waiting.pop())
        waiting += [
            entry.name for entry in entries.values() if name in entry.via and entry.name not in needed
        ]
    return needed


def requirements(cell: Cell) -> str:
    """The text of ``<cell>.in``: all that decides the lock, each line under its reason."""
    asked = [(item.requirement, item.reason) for item in cell.packages]
    asked += [(item.requirement, item.reason) for item in cell.requirements]
    overridden = [(item.requirement, f"{item.reason} ({item.source})") for item in cell.overrides]
    excluded = [(item.name, f"{item.reason} ({item.source})") for item in cell.excluded]
    built = ", ".join(build.package for build in cell.build_from_source if not build.recipe) or "none"
    return "".join(
        [
            f"# Written from matrix.yaml by `{COMMAND} {cell.lock}`; edit the matrix instead.\n",
            f"# Python {cell.python}, {resolver.platform(cell.base)}, the index as of {cell.exclude_newer}.\n",
            f"# Built from source: {built}. Everything else has to be a wheel.\n",
            *(_reasoned(line, reason) for line, reason in asked),
            "\n# Against what packages declare:\n" if overridden else "",
            *(_reasoned(f"# override {line}", reason) for line, reason in overridden),
            "\n# Required by packages, and left out:\n" if excluded else "",
            *(_reasoned(f"# without {name}", reason) for name, reason in excluded),
        ]
    )


def target(cell: Cell) -> Target:
    """How the lock of a cell is made."""
    question = resolver.Question(
        name=f"{cell.lock}.in",
        requirements=requirements(cell),
        overrides=tuple(item.requirement for item in cell.overrides),
        excluded=tuple(item.name for item in cell.excluded),
        sources=_built(cell),
        local=any("+" in package.requirement for package in cell.packages),
        python=cell.python,
        platform=resolver.platform(cell.base),
        exclude_newer=cell.exclude_newer,
    )
    return Target(path(cell), f"{COMMAND} {cell.lock}", requirements(cell), question)


def host_target(matrix: Matrix, pyproject: str) -> Target:
    """How the lock of the host's own tools is made, from the group ``test`` of ``pyproject``."""
    wanted = "".join(f"{line}\n" for line in _group(tomllib.loads(pyproject)["dependency-groups"], "test"))
    question = resolver.Question(
        name="host.in",
        requirements=wanted,
        python=matrix.host.python,
        exclude_newer=matrix.host.exclude_newer,
    )
    source = f"{wanted}{matrix.host.python} {matrix.host.exclude_newer}"
    return Target(HOST, f"{COMMAND} --host", source, question)


def render(target: Target, content: str) -> str:
    """The text of a lock file, with a header by which `stale` knows it."""
    header = HEADER.format(command=target.command, source=_sha256(target.source), content=_sha256(content))
    return header + content


def stale(target: Target, text: str) -> str | None:
    """Why the lock ``text`` is not the one for ``target``, as far as that shows without an index."""
    header, _, content = text.partition("\n")
    expected = render(target, content).partition("\n")[0]
    if header == expected:
        return None
    if f"Content sha256: {_sha256(content)}." not in header:
        return "was edited by hand"
    return "does not follow from what it is made of"


def require(cell: Cell) -> None:
    """A `UserError` unless the lock of ``cell`` is there, and follows from what the matrix says today."""
    item = target(cell)
    text = _read(item.path)
    if unlocked(cell):
        raise UserError(
            f"{cell.id} is not locked: run {item.command} where {preflight.packages(cell)} can be had"
        )
    if why := stale(item, text):
        name = item.path.relative_to(ROOT)
        raise UserError(f"{name} {why if text else 'is missing'}: run {item.command}")


def unlocked(cell: Cell) -> bool:
    """Whether the lock of a cell was never written, because not every machine can have what it pins."""
    return bool(cell.sources) and not path(cell).exists()


def differences(old: str, new: str) -> str:
    """What a new lock would change, for a person: the first few packages by name and version."""
    before = {entry.name: entry.version for entry in parse(old)}
    after = {entry.name: entry.version for entry in parse(new)}
    changed = [
        f"{name} {before.get(name, '(absent)')} -> {after.get(name, '(absent)')}"
        for name in sorted(before | after)
        if before.get(name) != after.get(name)
    ]
    shown = ", ".join(changed[:3]) or "hashes or requirers only"
    return shown + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")


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


def _reasoned(line: str, reason: str) -> str:
    return "\n" + textwrap.indent(textwrap.fill(reason, 105), "# ") + f"\n{line}\n"


def _group(groups: dict[str, list[str | dict[str, str]]], name: str) -> Iterator[str]:
    """The requirements of a dependency group, those of the groups that it includes among them."""
    for item in groups[name]:
        if isinstance(item, str):
            yield item
        else:
            yield from _group(groups, item["include-group"])


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _findings(targets: Sequence[Target], offline: bool) -> Iterator[str]:
    """A line for each stale file: which, why, and what to run."""
    for item in targets:
        name, text = item.path.relative_to(ROOT), _read(item.path)
        given = item.path.with_suffix(".in")
        if item.path != HOST and _read(given) != item.source:
            yield f"{given.relative_to(ROOT)} does not follow from matrix.yaml: run {item.command}"
        elif why := stale(item, text):
            yield f"{name} {why if text else 'is missing'}: run {item.command}"
        elif not offline and (new := render(item, resolver.answer(item.question))) != text:
            yield f"{name} is stale ({differences(text, new)}): run {item.command}"


def _write(item: Target) -> None:
    """Resolve first, write after: a failure leaves the files as they were."""
    text = render(item, resolver.answer(item.question))
    if item.path != HOST:
        item.path.with_suffix(".in").write_text(item.source, encoding="utf-8")
    item.path.write_text(text, encoding="utf-8")
    print(f"{item.path.relative_to(ROOT)}: {len(parse(text))} packages")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code, 1 for a stale lock."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cell", nargs="*", help="cell ids; all cells and the host's tools if none is given")
    parser.add_argument("--host", action="store_true", help="the host's own tools")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a lock is stale")
    parser.add_argument("--offline", action="store_true", help="with --check: ask no index")
    options = parser.parse_args(arguments)
    if options.offline and not options.check:
        parser.error("--offline goes with --check: a lock cannot be written without the index")
    matrix = load()
    everything = not (options.cell or options.host)
    cells = list(expand(matrix)) if everything else [find(matrix, cell_id) for cell_id in options.cell]
    left_out = [cell for cell in cells if everything and unlocked(cell)]
    cells = [cell for cell in cells if cell not in left_out]
    targets = [target(cell) for cell in cells]
    if everything or options.host:
        targets.append(host_target(matrix, _read(PYPROJECT)))
    if options.check:
        found = 0
        for line in _findings(targets, options.offline):  # shown at once: the next may need an index
            print(line, file=sys.stderr)
            found = 1
        return found
    for cell in left_out:
        print(f"{cell.id}: not locked; name it where {preflight.packages(cell)} can be had")
    for cell in cells:
        preflight.require_packages(cell)
    for item in targets:
        _write(item)
    return 0


if __name__ == "__main__":
    run(main)
