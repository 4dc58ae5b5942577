"""Properties of every valid matrix."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from scripts.errors import UserError
from scripts.matrix.load import MATRIX, Matrix, expand, find, parse

TEXT = MATRIX.read_text(encoding="utf-8")
NAMES = st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True)
VERSIONS = st.from_regex(r"[0-9]\.[0-9]{1,2}\.[0-9]", fullmatch=True)
VARIABLES = st.lists(st.sampled_from(["A", "B", "C"]), unique=True)
REASONED = {"reason": "r", "source": "s"}


def settings(names: list[str], value: str) -> list[dict[str, str]]:
    return [{"name": name, "value": value, **REASONED} for name in names]


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a valid matrix: some accelerators, each with its stack, each with some Ray versions."""
    accelerators = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    rays = draw(st.lists(VERSIONS, min_size=1, max_size=3, unique=True))
    pins = [{"name": name, "version": draw(VERSIONS), "reason": "r"} for name in ("torch", "vllm")]
    base = {"name": "b", "suite": "s", "architecture": "amd64", "glibc": "2.36", "python": "3.11"}
    variants = [
        {
            "name": f"on-{name}",
            "stack": "s",
            "accelerator": name,
            "base": "b",
            "layers": [{"name": "all", "packages": ["torch", "vllm", "ray"]}],
            "distributions": draw(
                st.sampled_from([[], [{"package": "vllm", "name": "other", "local": "x", **REASONED}]])
            ),
        }
        for name in accelerators
    ]
    cells = [
        {
            "variant": variant["name"],
            "ray": {"name": "ray", "version": ray, "reason": "r"},
            "support": {"from": "2026-01-01", "until": "2026-12-31"},
            "size_budget_mb": draw(st.integers(1, 10**5)),
            "tested": {"verified": "a", "unverified": "b"},
            "env": settings(draw(VARIABLES), "cell"),
        }
        for variant in variants
        for ray in rays
    ]
    return {
        "release": "1",
        "image": "i",
        "default": f"ray{rays[0]}-vllm{pins[1]['version']}-{accelerators[0]}",
        "source_date_epoch": 1,
        "host": {"python": "3.11", "exclude_newer": "2026-01-01"},
        "bases": [{**base, "runtime": [], "builder": []}],
        "accelerators": [
            {"name": name, "kind": "cpu", "env": settings(draw(VARIABLES), "accelerator")}
            for name in accelerators
        ],
        "stacks": [{"name": "s", "python": "3.11", "exclude_newer": "2026-01-01", "packages": pins}],
        "variants": variants,
        "cells": cells,
    }


@contextmanager
def one_line_problems() -> Iterator[None]:
    """Let a `UserError` pass if it is one line."""
    try:
        yield
    except UserError as problem:
        if len(str(problem).splitlines()) != 1:
            raise AssertionError(f"not one line: {problem!s}") from problem
        raise


def parsed(document: dict[str, Any]) -> Matrix:
    return parse(yaml.safe_dump(document))


@given(documents())
def test_every_entry_becomes_one_cell_with_an_id_of_its_own(document: dict[str, Any]) -> None:
    matrix = parsed(document)
    cells = expand(matrix)
    assert len({cell.id for cell in cells}) == len(cells) == len(document["cells"])
    assert [cell.is_default for cell in cells].count(True) == 1
    assert [find(matrix, cell.id) for cell in cells] == list(cells)
    assert expand(matrix) == cells


@given(documents())
def test_a_cell_has_every_package_of_its_stack_and_ray_at_the_version_written(
    document: dict[str, Any],
) -> None:
    written = {pin["name"]: pin["version"] for pin in document["stacks"][0]["packages"]}
    for entry, cell in zip(document["cells"], expand(parsed(document)), strict=True):
        assert cell.versions == {**written, "ray": entry["ray"]["version"]}
        for package in cell.packages:
            assert package.requirement.startswith(f"{package.distribution}=={package.version}")


@given(documents())
def test_a_cells_own_variable_holds_over_its_accelerators(document: dict[str, Any]) -> None:
    lower = {item["name"]: {s["name"] for s in item["env"]} for item in document["accelerators"]}
    for entry, cell in zip(document["cells"], expand(parsed(document)), strict=True):
        own = {setting["name"] for setting in entry["env"]}
        names = [setting.name for setting in cell.env]
        assert names == sorted(own | lower[cell.accelerator.name])
        assert {setting.name for setting in cell.env if setting.value == "cell"} == own


@given(documents(), st.sampled_from(["stacks", "accelerators", "bases", "variants"]))
def test_a_dangling_reference_is_reported(document: dict[str, Any], section: str) -> None:
    document[section][0]["name"] = "Renamed"
    with pytest.raises(
        UserError, match=r"^matrix\.yaml: (variants|cells)\[\d+\]\.\w+: expected one of .*; got"
    ):
        parsed(document)


@given(st.text())
def test_any_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(text)
    assert len(str(caught.value).splitlines()) == 1


@given(st.data())
def test_our_file_with_a_piece_cut_out_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(TEXT)))
    length = data.draw(st.integers(1, 200))
    with suppress(UserError), one_line_problems():
        parse(TEXT[:start] + TEXT[start + length :])
