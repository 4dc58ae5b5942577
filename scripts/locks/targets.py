"""The locks that the matrix requires: whether each is up to date, and how it is written.

The first line of a lock has the digest of its input and of its content, by which a check without an index
detects a manual edit and a changed matrix.
"""

import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.digests import sha256
from scripts.errors import UserError
from scripts.locks import lockfile, preflight, resolver
from scripts.matrix.load import Cell, Matrix
from scripts.paths import ROOT

PYPROJECT = ROOT / "pyproject.toml"
COMMAND = "python -m scripts lock"
HEADER = "# Written by `{command}`. Input sha256: {source}. Content sha256: {content}.\n"


@dataclass(frozen=True)
class Target:
    """A lock: its path, the command that writes it, its input as text, and the resolver's question."""

    path: Path
    command: str
    source: str
    question: resolver.Question


def target(cell: Cell) -> Target:
    """Return the lock of a cell."""
    question = resolver.Question(
        name=f"{cell.lock}.in",
        requirements=requirements(cell),
        overrides=tuple(item.requirement for item in cell.overrides),
        excluded=tuple(item.name for item in cell.excluded),
        sources=lockfile.built(cell),
        local=any("+" in package.requirement for package in cell.packages),
        python=cell.python,
        platform=resolver.platform(cell.base),
        exclude_newer=cell.exclude_newer,
    )
    return Target(lockfile.path(cell), f"{COMMAND} {cell.lock}", requirements(cell), question)


def host_target(matrix: Matrix) -> Target:
    """Return the lock of the host's own tools, the group ``test`` of pyproject.toml."""
    groups = tomllib.loads(_read(PYPROJECT))["dependency-groups"]
    wanted = "".join(f"{line}\n" for line in _group(groups, "test"))
    question = resolver.Question(
        name="host.in",
        requirements=wanted,
        python=matrix.host.python,
        exclude_newer=matrix.host.exclude_newer,
    )
    source = f"{wanted}{matrix.host.python} {matrix.host.exclude_newer}"
    return Target(lockfile.HOST, f"{COMMAND} --host", source, question)


def requirements(cell: Cell) -> str:
    """Return the text of ``<cell>.in``: everything that determines the lock, each line below its reason."""
    wanted = [(item.requirement, item.reason) for item in cell.packages]
    wanted += [(item.requirement, item.reason) for item in cell.requirements]
    overridden = [(item.requirement, f"{item.reason} ({item.source})") for item in cell.overrides]
    excluded = [(item.name, f"{item.reason} ({item.source})") for item in cell.excluded]
    from_source = ", ".join(build.package for build in cell.build_from_source if not build.recipe) or "none"
    return "".join(
        [
            f"# Written from matrix.yaml by `{COMMAND} {cell.lock}`; edit the matrix instead.\n",
            f"# Python {cell.python}, {resolver.platform(cell.base)}, index as of {cell.exclude_newer}.\n",
            f"# Built from source: {from_source}. Everything else must be a wheel.\n",
            *(_reasoned(line, reason) for line, reason in wanted),
            "\n# Replace what packages declare:\n" if overridden else "",
            *(_reasoned(f"# override {line}", reason) for line, reason in overridden),
            "\n# Required by packages, but not installed:\n" if excluded else "",
            *(_reasoned(f"# without {name}", reason) for name, reason in excluded),
        ]
    )


def render(item: Target, content: str) -> str:
    """Return the text of a lock file: a header with the digests, then the resolved content."""
    header = HEADER.format(command=item.command, source=sha256(item.source), content=sha256(content))
    return header + content


def stale(item: Target, text: str) -> str | None:
    """Return why a lock is out of date, as far as that is visible without an index, or None."""
    header, _, content = text.partition("\n")
    if header == render(item, content).partition("\n")[0]:
        return None
    if not text:
        return "is missing"
    return (
        "does not match its input"
        if f"Content sha256: {sha256(content)}." in header
        else "was edited by hand"
    )


def require(cell: Cell) -> None:
    """Raise `UserError` unless the lock of ``cell`` exists and matches the matrix."""
    item = target(cell)
    if unlocked(cell):
        raise UserError(
            f"{cell.id} is not locked: run {item.command} where {preflight.packages(cell)} are available"
        )
    if why := stale(item, _read(item.path)):
        raise UserError(f"{item.path.relative_to(ROOT)} {why}: run {item.command}")


def unlocked(cell: Cell) -> bool:
    """Return whether the lock of a cell was never written because its sources were unavailable."""
    return bool(cell.sources) and not lockfile.path(cell).exists()


def findings(targets: Sequence[Target], offline: bool) -> Iterator[str]:
    """Yield a line for each file that is out of date, with the reason and the command to run."""
    for item in targets:
        name, text = item.path.relative_to(ROOT), _read(item.path)
        listing = item.path.with_suffix(".in")
        if item.path != lockfile.HOST and _read(listing) != item.source:
            yield f"{listing.relative_to(ROOT)} does not match matrix.yaml: run {item.command}"
        elif why := stale(item, text):
            yield f"{name} {why}: run {item.command}"
        elif not offline and (new := render(item, resolver.answer(item.question))) != text:
            yield f"{name} is stale ({differences(text, new)}): run {item.command}"


def write(item: Target) -> None:
    """Resolve and write a lock; a failed resolution changes no file."""
    text = render(item, resolver.answer(item.question))
    if item.path != lockfile.HOST:
        item.path.with_suffix(".in").write_text(item.source, encoding="utf-8")
    item.path.write_text(text, encoding="utf-8")
    print(f"{item.path.relative_to(ROOT)}: {len(lockfile.parse(text))} packages")


def differences(old: str, new: str) -> str:
    """Summarize the changes of a new lock: the first packages by name and version."""
    before = {entry.name: entry.version for entry in lockfile.parse(old)}
    after = {entry.name: entry.version for entry in lockfile.parse(new)}
    changed = [
        f"{name} {before.get(name, '(absent)')} -> {after.get(name, '(absent)')}"
        for name in sorted(before | after)
        if before.get(name) != after.get(name)
    ]
    listed = ", ".join(changed[:3]) or "hashes or requirers only"
    return listed + (f" and {len(changed) - 3} more" if len(changed) > 3 else "")


def _reasoned(line: str, reason: str) -> str:
    return "\n" + textwrap.indent(textwrap.fill(reason, 105), "# ") + f"\n{line}\n"


def _group(groups: dict[str, list[str | dict[str, str]]], name: str) -> Iterator[str]:
    """Yield the requirements of a dependency group, with those of the groups that it includes."""
    for item in groups[name]:
        if isinstance(item, str):
            yield item
        else:
            yield from _group(groups, item["include-group"])


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.exists() else ""
