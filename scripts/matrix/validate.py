"""Checks of ``matrix.yaml`` beyond its types; each error has a path in the file and what was expected."""

import datetime
import re
from collections.abc import Iterator, Sequence

import packaging.version
from msgspec import inspect
from rlhf_stack.inputs.text import suggestion

from scripts.matrix.model import (
    CAPABILITIES,
    Accelerator,
    Base,
    Matrix,
    Stack,
    Variant,
    id_of,
    named,
    targets,
    unsupported_by,
)
from scripts.matrix.suites import SUITES

VERSION = re.compile(packaging.version.VERSION_PATTERN, re.VERBOSE | re.IGNORECASE | re.ASCII)
LONGEST = 64  # characters of a version
OLDEST = datetime.date(2016, 1, 1)  # no package of a stack is older
# The list that images/tools/trim.py reads has an action and a glob on each line; all that matches is removed.
PLAIN = r"(?!\.{1,2}(?:/|$))"
TRIMMED = re.compile(rf"(?!-){PLAIN}[\w.+-]+(?:/{PLAIN}[\w.+*?\[\]-]+)*", re.ASCII)


def validation_errors(matrix: Matrix) -> Iterator[tuple[str, str]]:
    """Yield path and message of each error; references are checked before what depends on them."""
    yield from _bad_names(matrix)
    yield from _bad_values(matrix)
    yield from _bad_references(matrix)
    for index, variant in enumerate(matrix.variants):
        yield from _bad_variant(matrix, variant, f"variants[{index}]")
        yield from _bad_excuses(matrix, variant, f"variants[{index}].without_code")
    yield from _bad_cells(matrix)


def _bad_names(matrix: Matrix) -> Iterator[tuple[str, str]]:
    """Yield names that appear twice in one list."""
    for section in ("bases", "toolchains", "accelerators", "stacks", "variants"):
        items: tuple[Base | Accelerator | Stack | Variant, ...] = getattr(matrix, section)
        yield from _duplicates([item.name for item in items], section)
    for index, base in enumerate(matrix.bases):
        yield from _duplicates([item.name for item in base.runtime], f"bases[{index}].runtime")
        yield from _duplicates([item.name for item in base.builder], f"bases[{index}].builder")
    for index, accelerator in enumerate(matrix.accelerators):
        yield from _bad_device(accelerator, f"accelerators[{index}]")
        yield from _duplicates([item.name for item in accelerator.env], f"accelerators[{index}].env")
        yield from _duplicates(
            [item.name for item in accelerator.profiles], f"accelerators[{index}].profiles"
        )
        for number, profile in enumerate(accelerator.profiles):
            path = f"accelerators[{index}].profiles[{number}].env"
            yield from _duplicates([item.name for item in profile.env], path)
    for index, stack in enumerate(matrix.stacks):
        yield from _duplicates([item.name for item in stack.packages], f"stacks[{index}].packages")
    for index, cell in enumerate(matrix.cells):
        yield from _duplicates([item.name for item in cell.env], f"cells[{index}].env")


def _bad_device(accelerator: Accelerator, path: str) -> Iterator[tuple[str, str]]:
    """Yield what `rlhf-stack doctor --host` could not compare with a machine."""
    if accelerator.kind == "cpu":
        return
    if accelerator.gpus is None or accelerator.driver is None:
        yield f"{path}.{'driver' if accelerator.gpus else 'gpus'}", "expected for an accelerator with GPUs"
    elif accelerator.kind == "cuda":
        versions = accelerator.gpus.architectures
        known = [CAPABILITIES.index(version) for version in versions if version in CAPABILITIES]
        if not len(versions) == len(known) == 2 or known != sorted(known):
            yield (
                f"{path}.gpus.architectures",
                f"expected the oldest and the newest compute capability, of {', '.join(CAPABILITIES)}",
            )
        if not re.fullmatch(r"\d+(\.\d+){1,2}", accelerator.driver.oldest):
            yield f"{path}.driver.oldest", f"expected a version, got {accelerator.driver.oldest!r}"


def _bad_values(matrix: Matrix) -> Iterator[tuple[str, str]]:
    """Yield versions that are no versions, days to come or long past, and paths outside of site-packages."""
    pins = {
        f"stacks[{index}].packages[{number}].version": pin.version
        for index, stack in enumerate(matrix.stacks)
        for number, pin in enumerate(stack.packages)
    }
    pins |= {f"cells[{index}].ray.version": cell.ray.version for index, cell in enumerate(matrix.cells)}
    for index, variant in enumerate(matrix.variants):
        own = f"variants[{index}]"
        for number, item in enumerate(variant.distributions):
            pins |= {f"{own}.distributions[{number}].version": item.version} if item.version else {}
        for number, second in enumerate(variant.side_by_side):
            pins[f"{own}.side_by_side[{number}].version"] = second.version
        for number, option in enumerate(variant.optional):
            pins[f"{own}.optional[{number}].version"] = option.version
        for number, layer in enumerate(variant.layers):
            for place, trim in enumerate(layer.trim):
                if not TRIMMED.fullmatch(trim.path):
                    yield (
                        f"{own}.layers[{number}].trim[{place}].path",
                        "expected a glob relative to site-packages such as torch/bin/test_*, without "
                        f"wildcards or '-' at its beginning, '.', '..' and spaces; got {trim.path!r}",
                    )
    for path, version in pins.items():
        if len(version) > LONGEST or version.lower().startswith("v") or not VERSION.fullmatch(version):
            yield path, f"expected a version such as 2.55.0; got {version[:LONGEST]!r}"
    days = {"host.exclude_newer": matrix.host.exclude_newer}
    days |= {
        f"stacks[{index}].exclude_newer": stack.exclude_newer for index, stack in enumerate(matrix.stacks)
    }
    for path, day in days.items():
        if day > datetime.datetime.now(tz=datetime.UTC).date():
            yield path, f"expected a day that has begun; got {day}"
        if day < OLDEST:
            yield path, f"expected a day from {OLDEST} on; got {day}"


def _duplicates(names: Sequence[str], path: str) -> Iterator[tuple[str, str]]:
    for index, name in enumerate(names):
        if (first := names.index(name)) < index:
            yield (f"{path}[{index}].name", f"expected a unique name, got {name!r} as {path}[{first}]")


def _bad_references(matrix: Matrix) -> Iterator[tuple[str, str]]:
    sections = {
        "stack": [item.name for item in matrix.stacks],
        "accelerator": [item.name for item in matrix.accelerators],
        "base": [item.name for item in matrix.bases],
    }
    for index, variant in enumerate(matrix.variants):
        for key, names in sections.items():
            yield from _dangling(getattr(variant, key), names, f"variants[{index}].{key}")
        for number, name in enumerate(variant.compile_proof.toolchains if variant.compile_proof else ()):
            path = f"variants[{index}].compile_proof.toolchains[{number}]"
            yield from _dangling(name, [item.name for item in matrix.toolchains], path)
    for index, stack in enumerate(matrix.stacks):
        if "vllm" not in (names := [pin.name for pin in stack.packages]):
            yield (f"stacks[{index}].packages", f"expected 'vllm', which is part of a cell id; got {names}")
    for index, cell in enumerate(matrix.cells):
        yield from _dangling(cell.variant, [item.name for item in matrix.variants], f"cells[{index}].variant")
        if cell.ray.name != "ray":
            yield f"cells[{index}].ray.name", f"expected 'ray', got {cell.ray.name!r}"
        for number, suite in enumerate(cell.ci_suites):
            yield from _dangling(suite, list(SUITES), f"cells[{index}].ci_suites[{number}]")


def _dangling(name: str, known: Sequence[str], path: str) -> Iterator[tuple[str, str]]:
    if name not in known:
        yield path, f"expected one of {', '.join(known) or '(none)'}; got {name!r}"


def _bad_variant(matrix: Matrix, variant: Variant, path: str) -> Iterator[tuple[str, str]]:
    stack, base = named(matrix.stacks, variant.stack), named(matrix.bases, variant.base)
    packages = [pin.name for pin in stack.packages] + ["ray"]
    further = (*stack.requirements, *variant.requirements)
    required = [re.split(r"[^A-Za-z0-9._-]", item.requirement, maxsplit=1)[0] for item in further]
    if base.python != stack.python:
        yield (
            f"{path}.base",
            f"expected a base with Python {stack.python} of {stack.name}; {base.name} has {base.python}",
        )
    for index, item in enumerate(variant.distributions):
        yield from _dangling(item.package, packages, f"{path}.distributions[{index}].package")
        if not (item.name or item.version or item.local):
            yield f"{path}.distributions[{index}]", "expected `name`, `version` or `local`; got none"
    for index, build in enumerate(variant.build_from_source):
        for name in (build.package, *build.needs):
            yield from _dangling(name, [*packages, *required], f"{path}.build_from_source[{index}]")
    for index, second in enumerate(variant.side_by_side):
        known = [layer.name for layer in variant.layers]
        yield from _dangling(second.layer, known, f"{path}.side_by_side[{index}].layer")
    for index, source in enumerate(variant.sources):
        if (source.image is None) == (source.requirement is None):
            yield f"{path}.sources[{index}]", "expected either `image` or `requirement`"
    system = [item.name for item in (*base.runtime, *base.builder, *variant.builder)]
    yield from _duplicates(system, f"{path}.builder (with its base)")
    if variant.plain_index and not any(item.local for item in variant.distributions):
        yield f"{path}.plain_index", "expected `local` in one of `distributions`, which it replaces; got none"
    if variant.stand_in:
        yield from _bad_stand_in(matrix, variant, variant.stand_in.variant, f"{path}.stand_in.variant")
    yield from _duplicates([item.name for item in variant.env], f"{path}.env")
    yield from _duplicates([item.name for item in variant.optional], f"{path}.optional")
    yield from _duplicates([item.name for item in variant.excluded], f"{path}.excluded")
    yield from _duplicates([layer.name for layer in variant.layers], f"{path}.layers")
    layered = [name for layer in variant.layers for name in layer.packages]
    for name in layered:
        yield from _dangling(name, [*packages, *required], f"{path}.layers")
    if wrong := [name for name in packages if layered.count(name) != 1]:
        yield (
            f"{path}.layers",
            f"expected every headline package in exactly one layer; violated by {', '.join(wrong)}",
        )


def _bad_excuses(matrix: Matrix, variant: Variant, path: str) -> Iterator[tuple[str, str]]:
    supported = targets(named(matrix.accelerators, variant.accelerator))
    for index, excuse in enumerate(variant.without_code):
        for name in excuse.architectures:
            yield from _dangling(name, supported, f"{path}[{index}].architectures")


def _bad_stand_in(matrix: Matrix, variant: Variant, name: str, path: str) -> Iterator[tuple[str, str]]:
    yield from _dangling(name, [item.name for item in matrix.variants], path)
    releases = {cell.ray.version for cell in matrix.cells if cell.variant == name}
    for cell in matrix.cells:
        if cell.variant == variant.name and cell.ray.version not in releases:
            yield path, f"{name} has no cell with Ray {cell.ray.version}, which the stand-in needs"


def _bad_cells(matrix: Matrix) -> Iterator[tuple[str, str]]:
    ids = [id_of(matrix, entry) for entry in matrix.cells]
    for index, (entry, cell_id) in enumerate(zip(matrix.cells, ids, strict=True)):
        if (first := ids.index(cell_id)) < index:
            yield f"cells[{index}]", f"expected a unique cell, got {cell_id} as cells[{first}]"
        if left_out := unsupported_by(matrix, cell_id):
            yield f"cells[{index}]", f"{cell_id} is unsupported: {left_out.reason}"
        if entry.support.until < entry.support.since:
            yield (
                f"cells[{index}].support.until",
                f"expected {entry.support.since} or later, got {entry.support.until}",
            )
    if matrix.default not in ids:
        yield "default", f"expected one of {', '.join(ids) or '(no cells)'}; got {matrix.default!r}"


def explain(message: str, data: object) -> str:
    """Rewrite msgspec's message as ``path: what was expected``, with the valid keys or values."""
    text, _, at = message.replace("`", "").partition(" - at ")
    key = at.startswith("key in ")
    steps = re.findall(r"[^.\[\]]+", at.removeprefix("key in ").removeprefix("$"))
    path = at.removeprefix("key in ").removeprefix("$").removeprefix(".") or "(top level)"
    kind = _type_at(steps)
    if unknown := re.search(r"unknown field (.*)", text):
        known = [field.encode_name for field in kind.fields] if isinstance(kind, inspect.StructType) else []
        meant = suggestion(unknown[1], known) or ";"
        return f"{path}: unknown key {unknown[1]!r}{meant} Expected: {', '.join(known)}"
    if missing := re.search(r"missing required field (.*)", text):
        return f"{path}: expected the key {missing[1]!r}, which is missing"
    if key:
        return f"{path}: expected every key to be text"
    value = _value_at(data, steps)
    got = f"; got {value!r}" if isinstance(value, str | int | float | datetime.date) else ""
    if isinstance(kind, inspect.LiteralType):
        return f"{path}: expected one of {', '.join(map(str, kind.values))}{got}"
    if isinstance(kind, inspect.DateType):
        return f"{path}: expected a date such as 2026-11-14{got}"
    quotes = " (in quotes it is text)" if text.startswith("Expected str") and got else ""
    return f"{path}: {text[:1].lower()}{text[1:]}{got}{quotes}"


def _type_at(steps: Sequence[str]) -> inspect.Type:
    """Return the type that the schema has at a path of the file."""
    kind: inspect.Type = inspect.type_info(Matrix)
    for step in steps:
        if isinstance(kind, inspect.StructType):
            kind = _bare(next(field.type for field in kind.fields if field.encode_name == step))
        elif isinstance(kind, inspect.VarTupleType):
            kind = _bare(kind.item_type)
    return kind


def _bare(kind: inspect.Type) -> inspect.Type:
    """Return a field's type without description and without None."""
    while isinstance(kind, inspect.Metadata | inspect.UnionType):
        options = [kind.type] if isinstance(kind, inspect.Metadata) else kind.types
        kind = next(option for option in options if not isinstance(option, inspect.NoneType))
    return kind


def _value_at(data: object, steps: Sequence[str]) -> object:
    """Return the value at a path of the file."""
    for step in steps:
        if isinstance(data, dict):
            data = data.get(step)
        elif isinstance(data, list):
            data = data[int(step)]
    return data
