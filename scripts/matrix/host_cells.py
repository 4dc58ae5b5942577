"""The table of cells in the file that finds which images run on a machine, derived from ``matrix.yaml``."""

from collections.abc import Iterable

from scripts.errors import UserError
from scripts.matrix.model import Cell
from scripts.paths import ROOT

FILE = ROOT / "images" / "runtime" / "rlhf_stack" / "diagnostics" / "host_check.py"
BEGIN = "# cells: begin, written by python -m scripts matrix host-cells\n"
END = "# cells: end\n"


def fill(text: str, cells: Iterable[Cell]) -> str:
    """Replace the table between the markers of `FILE`; `UserError` without both markers, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(f"{FILE.name}: expected the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return f"{before}{BEGIN}CELLS: tuple[Cell, ...] = (\n{''.join(map(_entry, cells))})\n{END}{after}"


def _entry(cell: Cell) -> str:
    gpus, driver = cell.accelerator.gpus, cell.accelerator.driver
    fields = (
        cell.id,
        cell.accelerator.name,
        gpus.architectures if gpus else (),
        driver.oldest if driver else "",
        not cell.sources,
    )
    return f"    Cell{fields!r},\n".replace("'", '"')
