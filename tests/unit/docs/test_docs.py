"""README.md and docs/: their links, paths and commands exist, and their paragraphs are short."""

import ast
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from rlhf_stack.cli import commands
from typer.core import TyperGroup

from scripts.cli import app
from scripts.paths import ROOT

README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
COLUMNS, LINES, README_LINES = 120, 5, 120
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:docs|scripts|images|patches|tests)/[^`\s]*)`")
PLACEHOLDER = re.compile(r"(?:^|/)(?:[A-Z]{2,}|NNNN-[^/]*)(?:/|$)")
SENTENCE = re.compile(r"(?<=\.)\s+(?=[A-Z`])")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def paragraphs(text: str) -> Iterator[list[str]]:
    """The lines of each paragraph and each list item; tables, code, headings and comments are left out."""
    for block in re.split(r"\n\s*\n", FENCE.sub("\n\n", text)):
        lines = [line for line in block.splitlines() if not line.startswith(("|", "#", "<!--", "!["))]
        starts = [index for index, line in enumerate(lines) if re.match(r"\s*(?:[-*]|\d+\.) ", line)]
        for first, end in zip([0, *starts], [*starts, len(lines)], strict=True):
            if lines[first:end]:
                yield lines[first:end]


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@each_page
def test_paths_exist(page: Path) -> None:
    named = [name for name in PATH.findall(page.read_text(encoding="utf-8")) if not PLACEHOLDER.search(name)]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= README_LINES


@each_page
def test_paragraphs_are_short(page: Path) -> None:
    for lines in paragraphs(page.read_text(encoding="utf-8")):
        assert len(lines) <= LINES, lines[0]
        assert max(map(len, lines)) <= COLUMNS, lines[0]


def test_each_measurement_has_a_date_and_a_command() -> None:
    _, *sections = (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8").split("\n## ")
    for section in sections:
        assert re.search(r"20\d\d-\d\d-\d\d", section), section
        assert re.search(r"`[^`]*(?:python|bash) [^`]+`", section), section


def test_commands_exist() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    listed = subprocess.run(
        [sys.executable, "-m", "nox", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    sessions = set(re.findall(r"^[*-] ([\w-]+)", listed.stdout, re.M))
    named = set(re.findall(r"nox\.sh -s ([\w-]+)", text))
    assert named
    assert named - sessions == set()
    assert set(re.findall(r"\brlhf-stack ([a-z][\w-]*)", text)) - set(commands.NAMES) == set()
    host = typer.main.get_command(app)
    assert isinstance(host, TyperGroup)
    for name, second in re.findall(r"python -m scripts ([a-z][\w-]*)(?: ([a-z][\w-]*))?", text):
        assert name in host.commands, f"python -m scripts {name}"
        command = host.commands[name]
        assert not isinstance(command, TyperGroup) or second in command.commands, f"{name} {second}"
    for module in re.findall(r"python -m (tests\.[\w.]+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


def test_commands_of_benchmarks_name_the_path_of_the_runtime_package() -> None:
    """The runtime's package is installed in images alone; a benchmark that imports it needs its path."""
    files = {f"tests.bench.{file.stem}": file for file in (ROOT / "tests" / "bench").glob("*.py")}
    sources = {module: file.read_text(encoding="utf-8") for module, file in files.items()}
    text = "\n".join([*(page.read_text(encoding="utf-8") for page in PAGES), *sources.values()])
    commands_of = re.findall(r"`([^`\n]*)python -m (tests\.bench\.\w+)", text)
    assert commands_of
    for before, module in commands_of:
        needed = re.search(r"^(?:from|import) rlhf_stack", sources[module], re.M)
        assert not needed or before.startswith("PYTHONPATH=images/runtime "), module


def packages() -> Iterator[Path]:
    """The packages that `[tool.importlinter]` has as layers, and modules next to them."""
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]:
        for container in contract.get("containers", ()):
            root = ROOT if container == "scripts" else ROOT / "images" / "runtime"
            for layer in contract["layers"]:
                yield from (root / container / name.strip() for name in layer.split("|"))


@pytest.mark.parametrize("package", ["rlhf_stack", "scripts"])
def test_the_figure_has_every_package_in_its_layer(package: str) -> None:
    """From the top to the bottom, packages of one layer at the same height, each in a box."""
    drawn = xml.etree.ElementTree.parse(ARCHITECTURE.with_suffix(".svg")).getroot()  # noqa: S314  (ours)
    left, right = (0, 550) if package == "scripts" else (550, 1200)
    centres = {
        (float(box.get("x", 0)) + float(box.get("width", 0)) / 2, float(box.get("y", 0)) + 18)
        for box in drawn.iterfind("{*}rect")
    }
    rows: dict[float, list[str]] = {}
    for text in drawn.iterfind("{*}text"):
        x, y = float(text.get("x", 0)), float(text.get("y", 0))
        is_name = text.get("text-anchor") == "middle" and text.get("font-size") == "13"
        if is_name and left < x < right:
            assert (x, y) in centres, f"{text.text} has no box"
            rows.setdefault(y, []).append(str(text.text))
    (layers,) = (
        contract["layers"]
        for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
            "contracts"
        ]
        if contract.get("containers") == [package]
    )
    assert [" | ".join(row) for _, row in sorted(rows.items())] == layers


def test_the_architecture_has_every_package_as_it_describes_itself() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", ARCHITECTURE.read_text(encoding="utf-8"), re.M)
    for package in packages():
        assert package.name in dict(rows), package
        if package.is_dir():
            found = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
            sentences = SENTENCE.split(" ".join(found.replace("``", "`").split()))[:2]
            assert (package.name, " ".join(sentences)) in rows, package
