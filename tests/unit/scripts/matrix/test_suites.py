"""The reasons for which tests may be skipped are declared by their suite."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.matrix.suites import SUITES
from scripts.paths import ROOT

# Each would leave out what a release has to test, or is not of an image of ours.
REFUSED = (
    "measured once, as the image's own user",
    "neither `docker compose` nor docker-compose is installed",
    "these runs need a CPU cell",
    "this image is built FROM ours and adds packages",
)


def reasons(file: Path) -> Iterator[str]:
    """Yield the reasons of a file's skips, with 0 for what is filled in; not those in a variable."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found = {keyword.arg: keyword.value for keyword in node.keywords}.get("reason")
            if node.func.attr == "skip" and node.args:
                found = node.args[0]
            if node.func.attr in {"skip", "skipif"} and isinstance(found, ast.Constant):
                yield str(found.value)
            elif node.func.attr == "importorskip":
                yield from _too_old(node)
            elif isinstance(found, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "0" for part in found.values)
                yield "".join(map(str, parts))


def _too_old(call: ast.Call) -> Iterator[str]:
    """Yield pytest's reason if an import is skipped for its version and no reason is given."""
    given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    if "minversion" in given and "reason" not in given:
        name, older = ast.literal_eval(call.args[0]), int(given["minversion"].partition(".")[0]) - 1
        yield f"module {name!r} has __version__ '{older}.1', required is: {given['minversion']!r}"


@pytest.mark.parametrize("folder", sorted({suite.folder for suite in SUITES.values() if suite.folder}))
def test_the_suites_of_a_folder_declare_its_skips(folder: str) -> None:
    declared = [known for suite in SUITES.values() if suite.folder == folder for known in suite.skips]
    found = {reason for file in (ROOT / "tests" / folder).rglob("*.py") for reason in reasons(file)}
    unknown = [reason for reason in found if not any(re.fullmatch(known, reason) for known in declared)]
    assert sorted(set(unknown) - set(REFUSED)) == []


def test_a_mark_for_other_cells_is_declared() -> None:
    [reason] = reasons(ROOT / "tests" / "conftest.py")
    assert re.fullmatch(SUITES["patches"].skips[0], reason)
