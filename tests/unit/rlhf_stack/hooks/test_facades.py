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
    """Return each façade's ``__all__``; it is not imported, because flash_attn's needs einops."""
    exported = {}
    for path in FACADES.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                exported[path.stem] = set(ast.literal_eval(node.value))
    return exported


def is_call(line: str) -> bool:
    return not MODULE.fullmatch(line) and not NAMES.fullmatch(line)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.parents[1].name}/{patch.name}")
def test_a_patch_imports_only_facades(patch: Path) -> None:
    assert [line for line in added_lines(patch) if "rlhf_stack" in line and is_call(line)] == []


def test_patches_use_exactly_the_names_that_the_facades_export() -> None:
    assert used_names() == exported_names()


def test_every_module_of_the_package_is_a_facade() -> None:
    assert exported_names().keys() == {path.stem for path in FACADES.glob("*.py")} - {"__init__"}
