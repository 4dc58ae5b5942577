"""Read ``matrix.yaml``, validate it, and expand it into cells with every reference resolved."""

import json
import os
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import msgspec
import yaml
from rlhf_stack.inputs.text import suggestion

from scripts.errors import UserError
from scripts.matrix.model import (
    PLAIN_INDEX,
    STAND_IN,
    Cell,
    CellEntry,
    Distribution,
    Matrix,
    Override,
    Package,
    Pin,
    PlainIndex,
    Setting,
    SourceBuild,
    StandIn,
    id_of,
    named,
    unsupported_by,
)
from scripts.matrix.validate import explain, validation_errors
from scripts.paths import ROOT

DEEPEST = 50  # levels of nesting
MATRIX = ROOT / "matrix.yaml"
IMAGE = "RLHF_STACKS_IMAGE"  # overrides the image name, so that two checkouts can share a Docker daemon
REPOSITORY = re.compile(r"(?:[a-zA-Z0-9.-]+(?::[0-9]+)?/)?[a-z0-9]+(?:(?:[._/]|__|-+)[a-z0-9]+)*")
SCHEMA = ROOT / "matrix.schema.json"


class _UniqueKeys(yaml.CSafeLoader):
    """A YAML loader that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if not isinstance(key, Hashable):
                continue  # super() refuses it, with its position
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} appears twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse(text: str, file: str = MATRIX.name) -> Matrix:
    """Parse and validate a matrix; `UserError` names ``file``, the path in it and what was expected."""
    try:
        _refuse_depth(text, file)
        data = yaml.load(text, _UniqueKeys)  # noqa: S506  (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise UserError(f"{file}{where}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date
        raise UserError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from None
    try:
        matrix = msgspec.convert(data, Matrix)
    except msgspec.ValidationError as error:
        raise UserError(f"{file}: {explain(str(error), data)}") from None
    for path, message in validation_errors(matrix):
        raise UserError(f"{file}: {path}: {message}")
    return matrix


def _refuse_depth(text: str, file: str) -> None:
    """Raise `UserError` for nesting on which libyaml's stack would overflow."""
    depth = 0
    for event in yaml.parse(text, yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise UserError(f"{file}: nested more than {DEEPEST} levels deep")


def load(path: Path = MATRIX) -> Matrix:
    """Read the matrix from a file; the environment variable `IMAGE` overrides its image name."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path.name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path.name}: not UTF-8 text") from None
    matrix = parse(text, path.name)
    given = os.environ.get(IMAGE)
    image = given or matrix.image
    if not REPOSITORY.fullmatch(image):
        where = f"{IMAGE}=" if given else f"{path.name}: image: "
        raise UserError(
            f"{where}{image!r}: no image has this name: expected one such as host:5000/rlhf-stacks"
        )
    return msgspec.structs.replace(matrix, image=image)


def expand(matrix: Matrix) -> tuple[Cell, ...]:
    """Return the cells of a valid matrix, in the order of the file."""
    return tuple(_resolve(matrix, entry) for entry in matrix.cells)


def expand_all(matrix: Matrix) -> tuple[Cell, ...]:
    """Return all cells, and the stand-ins of those that have one."""
    return (*expand(matrix), *stand_ins(matrix))


def stand_ins(matrix: Matrix) -> tuple[Cell, ...]:
    """Return the stand-ins: images for tests of cells whose packages are not available everywhere."""
    variants = {variant.name: variant for variant in matrix.variants}
    return tuple(
        _stand_in(_resolve(matrix, entry), _resolve(matrix, twin), stand_in)
        for entry in matrix.cells
        if (stand_in := variants[entry.variant].stand_in)
        for twin in matrix.cells
        if (twin.variant, twin.ray.version) == (stand_in.variant, entry.ray.version)
    )


def plain_index_cells(matrix: Matrix) -> tuple[Cell, ...]:
    """Return the stand-ins of cells that need wheels which the plain Python index does not have."""
    return tuple(_from_plain_index(cell, cell.plain_index) for cell in expand(matrix) if cell.plain_index)


def find(matrix: Matrix, cell_id: str) -> Cell:
    """Return a cell or stand-in by id; `UserError` gives the reason if unsupported, or the nearest id."""
    cells = {cell.id: cell for cell in (*expand_all(matrix), *plain_index_cells(matrix))}
    if cell_id in cells:
        return cells[cell_id]
    if left_out := unsupported_by(matrix, cell_id):
        raise UserError(f"{cell_id} is unsupported: {left_out.reason} ({left_out.source})")
    near = suggestion(cell_id, cells) or "."
    raise UserError(f"no cell {cell_id!r}{near} All: python -m scripts matrix list")


def with_option(cell: Cell, name: str) -> Cell:
    """Return the cell with an optional package in its top layer, under its own tag; else `UserError`."""
    option = next((option for option in cell.optional if option.name == name), None)
    if option is None:
        reasons = (item.reason for item in cell.excluded if item.name == name)
        reason = next(reasons, "the matrix has no such option")
        raise UserError(f"{cell.id} cannot be built with {name}: {reason}")
    *lower, top = cell.layers
    build = SourceBuild(package=name, recipe=option.recipe, reason=option.reason, env=option.env)
    return msgspec.structs.replace(
        cell,
        tag=f"{cell.tag}-with-{name}",
        layers=(*lower, msgspec.structs.replace(top, packages=(*top.packages, name))),
        build_from_source=(*cell.build_from_source, build),
    )


def schema() -> str:
    """Return the JSON Schema of ``matrix.yaml``, for editors."""
    document = msgspec.json.schema(Matrix)
    return (
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **document}, indent=2) + "\n"
    )


def _resolve(matrix: Matrix, entry: CellEntry) -> Cell:
    variant = named(matrix.variants, entry.variant)
    stack = named(matrix.stacks, variant.stack)
    accelerator = named(matrix.accelerators, variant.accelerator)
    accelerator = msgspec.structs.replace(accelerator, env=_merged(matrix.env, accelerator.env))
    base = named(matrix.bases, variant.base)
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
        base=msgspec.structs.replace(base, builder=(*base.builder, *variant.builder)),
        accelerator=accelerator,
        packages=packages,
        requirements=(*stack.requirements, *variant.requirements),
        excluded=(*variant.excluded, *entry.excluded),
        overrides=(*variant.overrides, *entry.overrides),
        layers=variant.layers,
        build_from_source=variant.build_from_source,
        side_by_side=variant.side_by_side,
        optional=variant.optional,
        env=_merged(accelerator.env, variant.env, entry.env),
        support=entry.support,
        size_budget_mb=entry.size_budget_mb,
        tested=entry.tested,
        ci_suites=entry.ci_suites,
        lock=cell_id,
        sources=variant.sources,
        without_code=variant.without_code,
        plain_index=variant.plain_index,
    )


def _stand_in(cell: Cell, twin: Cell, stand_in: StandIn) -> Cell:
    """Return ``cell`` on the packages of its twin, with its own Ray, OpenRLHF, patches and defaults."""
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
        ci_suites=cell.ci_suites,
        stand_in=stand_in.reason,
    )


def _from_plain_index(cell: Cell, plain: PlainIndex) -> Cell:
    """Return ``cell`` without local versions, which an override replaces in what its packages require."""
    replaced = [package for package in cell.packages if "+" in package.requirement]
    packages = {
        package.name: msgspec.structs.replace(package, requirement=package.requirement.partition("+")[0])
        for package in replaced
    }
    overrides = (
        Override(requirement=package.requirement, reason=plain.reason, source=plain.source)
        for package in packages.values()
    )
    return msgspec.structs.replace(
        cell,
        id=cell.id + PLAIN_INDEX,
        tag=cell.tag + PLAIN_INDEX,
        is_default=False,
        packages=tuple(packages.get(package.name, package) for package in cell.packages),
        overrides=(*cell.overrides, *overrides),
        size_budget_mb=plain.size_budget_mb,
        tested=plain.tested,
        ci_suites=(),
        lock=cell.id + PLAIN_INDEX,
        plain_index=None,
        stand_in=plain.reason,
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
    """Merge settings, sorted by name; a later part replaces an earlier one's value."""
    settings = {setting.name: setting for part in parts for setting in part}
    return tuple(settings[name] for name in sorted(settings))
