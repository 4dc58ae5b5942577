"""Read ``matrix.yaml``, check it, and expand it into cells with everything resolved.

``python -m scripts.matrix.load list | show CELL | schema [--check]``
"""

import argparse
import json
import os
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from scripts.errors import UserError, run
from scripts.matrix.model import (
    STAND_IN,
    Base,
    Cell,
    CellEntry,
    Distribution,
    Matrix,
    Package,
    Pin,
    Setting,
    StandIn,
    id_of,
    named,
    nearest,
    unsupported_by,
)
from scripts.matrix.validate import explain, mistakes
from scripts.paths import ROOT

__all__ = [
    "MATRIX",
    "ROOT",
    "SCHEMA",
    "Base",
    "Cell",
    "Matrix",
    "Setting",
    "expand",
    "find",
    "load",
    "parse",
    "schema",
    "stand_ins",
]

MATRIX = ROOT / "matrix.yaml"
IMAGE = "RLHF_STACKS_IMAGE"  # another image name, so that two checkouts on one engine keep apart
SCHEMA = ROOT / "matrix.schema.json"


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key written twice is an error, not a silent overwrite."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if not isinstance(key, Hashable):
                continue  # refused below, with its place
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is written twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse(text: str, file: str = MATRIX.name) -> Matrix:
    """The matrix in ``text``; a `UserError` names ``file``, the path in it and what was expected."""
    try:
        data = yaml.load(text, _UniqueKeys)  # noqa: S506  (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise UserError(f"{file}{where}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise UserError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
    try:
        matrix = msgspec.convert(data, Matrix)
    except msgspec.ValidationError as error:
        raise UserError(f"{file}: {explain(str(error), data)}") from None
    for path, mistake in mistakes(matrix):
        raise UserError(f"{file}: {path}: {mistake}")
    return matrix


def load(path: Path = MATRIX) -> Matrix:
    """The matrix in the file ``path``; its image name is what the variable `IMAGE` says, if it is set."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path.name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path.name}: not UTF-8 text") from None
    matrix = parse(text, path.name)
    return msgspec.structs.replace(matrix, image=os.environ.get(IMAGE) or matrix.image)


def expand(matrix: Matrix) -> tuple[Cell, ...]:
    """The cells of a checked matrix, in the order of the file."""
    return tuple(_resolve(matrix, entry) for entry in matrix.cells)


def stand_ins(matrix: Matrix) -> tuple[Cell, ...]:
    """What stands in, for tests alone, for cells whose packages cannot be had everywhere."""
    variants = {variant.name: variant for variant in matrix.variants}
    return tuple(
        _stand_in(_resolve(matrix, entry), _resolve(matrix, twin), stand_in)
        for entry in matrix.cells
        if (stand_in := variants[entry.variant].stand_in)
        for twin in matrix.cells
        if (twin.variant, twin.ray.version) == (stand_in.variant, entry.ray.version)
    )


def find(matrix: Matrix, cell_id: str) -> Cell:
    """The cell of that id; a `UserError` says why it is unsupported, or names the nearest."""
    cells = {cell.id: cell for cell in (*expand(matrix), *stand_ins(matrix))}
    if cell_id in cells:
        return cells[cell_id]
    if left_out := unsupported_by(matrix, cell_id):
        raise UserError(f"{cell_id} is unsupported: {left_out.reason} ({left_out.source})")
    raise UserError(
        f"no cell {cell_id!r}; did you mean {nearest(cell_id, cells)!r}? All: python -m scripts.matrix.load list"
    )


def schema() -> str:
    """The JSON Schema of ``matrix.yaml``, for editors."""
    document = msgspec.json.schema(Matrix)
    return (
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **document}, indent=2) + "\n"
    )


def _resolve(matrix: Matrix, entry: CellEntry) -> Cell:
    variant = named(matrix.variants, entry.variant)
    stack = named(matrix.stacks, variant.stack)
    accelerator = named(matrix.accelerators, variant.accelerator)
    cell_id = id_of(matrix, entry)
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
        base=named(matrix.bases, variant.base),
        accelerator=accelerator,
        packages=packages,
        requirements=stack.requirements,
        excluded=(*variant.excluded, *entry.excluded),
        overrides=(*variant.overrides, *entry.overrides),
        layers=variant.layers,
        build_from_source=variant.build_from_source,
        beside=variant.beside,
        optional=variant.optional,
        env=_merged(accelerator.env, variant.env, entry.env),
        support=entry.support,
        size_budget_mb=entry.size_budget_mb,
        tested=entry.tested,
        per_submission=entry.per_submission,
        lock=cell_id,
        sources=variant.sources,
    )


def _stand_in(cell: Cell, twin: Cell, stand_in: StandIn) -> Cell:
    """``cell`` on the packages of its twin: Ray, OpenRLHF, patches and env defaults are its own."""
    return msgspec.structs.replace(
        twin,
        id=cell.id + STAND_IN,
        tag=cell.tag + STAND_IN,
        is_default=False,
        variant=cell.variant,
        accelerator=msgspec.structs.replace(cell.accelerator, kind=twin.accelerator.kind),
        env=_merged(twin.env, cell.env),
        support=cell.support,
        tested=stand_in.tested,
        per_submission=cell.per_submission,
        stand_in=stand_in.reason,
    )


def _package(pin: Pin, source: Distribution | None) -> Package:
    name = (source and source.name) or pin.name
    version = (source and source.version) or pin.version
    local = f"+{source.local}" if source and source.local else ""
    extras = f"[{','.join(pin.extras)}]" if pin.extras else ""
    return Package(
        name=pin.name,
        version=version,
        distribution=name,
        requirement=f"{name}{extras}=={version}{local}",
        reason="; ".join([pin.reason, *([source.reason] if source else [])]),
    )


def _merged(*parts: tuple[Setting, ...]) -> tuple[Setting, ...]:
    """All of them, sorted by name; where several set a variable, the last one holds."""
    settings = {setting.name: setting for part in parts for setting in part}
    return tuple(settings[name] for name in sorted(settings))


def _schema_command(check: bool) -> int:
    text = schema()
    if not check:
        SCHEMA.write_text(text, encoding="utf-8")
        return 0
    if SCHEMA.exists() and SCHEMA.read_text(encoding="utf-8") == text:
        return 0
    print(f"{SCHEMA.name} is stale: run python -m scripts.matrix.load schema", file=sys.stderr)
    return 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; prints to stdout, returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.matrix.load", description="The cells of matrix.yaml."
    )
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
