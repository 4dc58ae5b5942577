"""The locks that the matrix requires: whether each is up to date, and how it is written.

The first line of a lock has the digest of its input and of its content, by which a check without an index
detects a manual edit and a changed matrix.
"""

import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.digests import sha256
from scripts.errors import UserError
from scripts.locks import debian, lockfile, preflight, resolver
from scripts.matrix.load import Cell, Matrix
from scripts.matrix.model import Base
from scripts.paths import ROOT

PYPROJECT = ROOT / "pyproject.toml"
COMMAND = "python -m scripts lock"
HEADER = "# Written by `{command}`. Input sha256: {source}. Content sha256: {content}.\n"


@dataclass(frozen=True)
class Target:
    """A lock: its path, the command that writes it, its input as text, and how its content is resolved.

    ``versions`` parses a lock into versions by package, and ``lost`` names what the first of two texts has
    and nobody offers any more. ``listed`` is whether a file next to the lock has its input.
    """

    path: Path
    command: str
    source: str
    resolve: Callable[[], str]
    versions: Callable[[str], Mapping[str, str]]
    lost: Callable[[str, str], Sequence[str]] = lambda *_: ()
    listed: bool = False


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
    return Target(
        lockfile.path(cell),
        f"{COMMAND} {cell.lock}",
        requirements(cell),
        lambda: resolver.answer(question),
        lockfile.versions,
        listed=True,
    )


def base_target(matrix: Matrix, base: Base) -> Target:
    """Return the lock of a base's Debian packages."""
    wanted = debian.roots(matrix, base)
    return Target(
        debian.path(base),
        f"{COMMAND} {base.name}",
        debian.question(base, wanted),
        lambda: debian.resolve(base, wanted),
        debian.versions,
        debian.removed,
    )


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
    return Target(
        lockfile.HOST, f"{COMMAND} --host", source, lambda: resolver.answer(question), lockfile.versions
    )


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
    _require_current(item)


def locked_debs(matrix: Matrix, base: Base) -> tuple[debian.Deb, ...]:
    """Return the locked packages of a base; `UserError` unless its lock matches the matrix."""
    return debian.parse(_require_current(base_target(matrix, base)))


def _require_current(item: Target) -> str:
    """Return the text of a lock; `UserError` if it is missing or does not match the matrix."""
    text = _read(item.path)
    if why := stale(item, text):
        raise UserError(f"{item.path.relative_to(ROOT)} {why}: run {item.command}")
    return text


def unlocked(cell: Cell) -> bool:
    """Return whether the lock of a cell was never written because its sources were unavailable."""
    return bool(cell.sources) and not lockfile.path(cell).exists()


def findings(targets: Sequence[Target], offline: bool) -> Iterator[str]:
    """Yield a line for each file that is out of date, with the reason and the command to run."""
    for item in targets:
        name, text = item.path.relative_to(ROOT), _read(item.path)
        listing = item.path.with_suffix(".in")
        if item.listed and _read(listing) != item.source:
            yield f"{listing.relative_to(ROOT)} does not match matrix.yaml: run {item.command}"
        elif why := stale(item, text):
            yield f"{name} {why}: run {item.command}"
        elif not offline and (new := render(item, item.resolve())) != text:
            yield f"{name} is stale ({differences(item, text, new)}): run {item.command}"


def write(item: Target) -> None:
    """Resolve and write a lock; a failed resolution changes no file."""
    text = render(item, item.resolve())
    if item.listed:
        item.path.with_suffix(".in").write_text(item.source, encoding="utf-8")
    item.path.write_text(text, encoding="utf-8")
    print(f"{item.path.relative_to(ROOT)}: {len(item.versions(text))} packages")


def differences(item: Target, old: str, new: str) -> str:
    """Summarize the changes of a new lock: the first packages by name and version, and the lost ones."""
    before, after = item.versions(old), item.versions(new)
    changed = [
        f"{name} {before.get(name, '(absent)')} -> {after.get(name, '(absent)')}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
    lost = [f"no longer available: {name}" for name in item.lost(old, new)]
    return "; ".join([_first(changed) or "hashes or requirers only", *([_first(lost)] if lost else [])])


def _first(items: Sequence[str], shown: int = 3) -> str:
    return ", ".join(items[:shown]) + (f" and {len(items) - shown} more" if len(items) > shown else "")


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
