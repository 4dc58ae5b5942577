"""Options and output that benchmarks share: one run's figures as a table or as JSON."""

import argparse
import json
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """A measurement, ours and the peer's in the same run; ``peer`` is None if it was not measured."""

    name: str
    unit: str
    ours: float
    peer: float | None = None

    @property
    def ratio(self) -> float | None:
        """The peer's figure divided by ours: above 1, ours is smaller."""
        return self.peer / self.ours if self.peer is not None and self.ours else None


def parser(module: str, text: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    options = argparse.ArgumentParser(
        prog=f"python -m tests.bench.{module}", description=(text or "").split("\n")[0]
    )
    options.add_argument("--cell", help="a cell id (default: the default cell)")
    options.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return options


def show(rows: list[Row], notes: list[str], as_json: bool, peer_name: str = "plain pip") -> None:
    """Print the figures; a benchmark does not judge them."""
    if as_json:
        print(json.dumps({"rows": [{**asdict(row), "ratio": row.ratio} for row in rows], "notes": notes}))
        return
    table = Table("measured", "ours", peer_name, f"{peer_name} / ours")
    for row in rows:
        peer = "" if row.peer is None else f"{row.peer:.4g} {row.unit}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.name, f"{row.ours:.4g} {row.unit}", peer, ratio)
    console = Console()
    console.print(table)
    for note in notes:
        console.print(f"- {note}")
