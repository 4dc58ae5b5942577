"""The patches and the façades of `rlhf_stack.hooks` agree on every name, and patches import nothing else."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from rlhf_stack import hooks

from scripts.paths import ROOT

FACADES = Path(str(hooks.__file__)).parent
PATCHES = sorted((ROOT / "patches").glob("*/*/*.patch"))
MODULE = re.compile(r"from rlhf_stack\.hooks import (\w+) as hooks")
NAMES = re.compile(r"from rlhf_stack\.hooks\.(\w+) import ([\w, ]+)")


def added_lines(patch: Path) -> list[str]:
    """Return the lines that a patch adds, without their indentation."""
    diff = patch.read_text(encoding="utf-8").partition("\n---\n")[2]
    return [line[1:].strip() for line in diff.splitlines() if line.startswith("+") and line[:3] != "+++"]


def used_names() -> dict[str, set[str]]:
    """Return the names that the patches use, by façade: imported, or attributes of a series' ``hooks``."""
    used: defaultdict[str, set[str]] = defaultdict(set)
    for series in {patch.parent for patch in PATCHES}:
        lines = [line for patch in series.glob("*.patch") for line in added_lines(patch)]
        for match in filter(None, map(NAMES.fullmatch, lines)):
            used[match[1]].update(match[2].split(", "))
        for facade in {match[1] for match in map(MODULE.fullmatch, lines) if match}:
            used[facade].update(re.findall(r"\bhooks\.(\w+)", "\n".join(filter(is_call, lines))))
    return used


def exported_names() -> dict[str, set[str]]:
    """Return the names that each façade defines, or imports and does not use; flash_attn's needs einops."""
    exported = {}
    for path in FACADES.glob("[!_]*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        exported[path.stem] = defined | imported - used
    return exported


def is_call(line: str) -> bool:
    return not MODULE.fullmatch(line) and not NAMES.fullmatch(line)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.parents[1].name}/{patch.name}")
def test_a_patch_imports_only_facades(patch: Path) -> None:
    assert [line for line in added_lines(patch) if "rlhf_stack" in line and is_call(line)] == []


def test_patches_use_exactly_the_names_that_the_facades_export() -> None:
    assert used_names() == exported_names()
