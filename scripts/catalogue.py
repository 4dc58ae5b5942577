"""Write the README's table of cells from the matrix: ``python -m scripts.catalogue [--check]``."""

import argparse
import sys

from scripts.matrix import ROOT, Cell, expand, load
from scripts.problem import Problem, run

README = ROOT / "README.md"
BEGIN, END = "<!-- cells: written by python -m scripts.catalogue -->", "<!-- end of cells -->"
COLUMNS = ("cell", "OpenRLHF", "Ray", "vLLM", "DeepSpeed", "torch", "shown", "not shown", "supported until")


def row(cell: Cell) -> tuple[str, ...]:
    """What a reader has to know of a cell, in the order of `COLUMNS`."""
    name = f"`{cell.id}`{' (default)' if cell.is_default else ''}"
    versions = [_version(cell, package) for package in ("openrlhf", "ray", "vllm", "deepspeed", "torch")]
    return (name, *versions, cell.tested.shown, cell.tested.not_shown, str(cell.support.until))


def table(cells: tuple[Cell, ...]) -> str:
    """The Markdown table."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(row(cell) for cell in cells)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def filled(text: str, cells: tuple[Cell, ...]) -> str:
    """``text`` with the table between the markers; a `Problem` without both, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise Problem(f"{README.name}: expected the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{table(cells)}\n{END}{after}"


def _version(cell: Cell, name: str) -> str:
    """A version, and where it comes from if that is not the project itself."""
    package = cell.package(name)
    return (
        package.version if package.distribution == name else f"{package.version} (`{package.distribution}`)"
    )


def main() -> int:
    """The command line; with ``--check`` exit code 1 when the table is stale."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.catalogue", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when it is stale")
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    new = filled(text, expand(load()))
    if options.check and new != text:
        print(
            f"the table of cells in {README.name} is stale: run python -m scripts.catalogue", file=sys.stderr
        )
        return 1
    if not options.check:
        README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    run(main)
