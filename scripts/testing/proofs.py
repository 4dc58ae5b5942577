"""What the tests of the patches said: each patch on the package as released, and on ours."""

import re
from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from scripts.matrix.load import Cell
from scripts.patches.series import Series
from scripts.testing.records import Proof

CAUSE = re.compile(r"\b([A-Z]\w*(?:Error|Exception|Exit|Timeout|Expired))\b")
PASSED = "exit 0"


class Proved(msgspec.Struct, frozen=True):
    """How the tests of a patch ended on the package as released, and on the patched one."""

    pristine: str
    patched: str


def proofs_of(series: Iterable[Series], proofs: Sequence[Proof]) -> dict[str, Proved]:
    """How each patch was proved, by ``package/name``; those whose test did not run are left out."""
    found = {}
    for s in series:
        for patch in s.patches:
            runs = [proof for proof in proofs if proof.file == patch.header["Test"]]
            if runs:
                found[f"{s.package}/{patch.name}"] = Proved(
                    pristine=_ended(proof.pristine for proof in runs),
                    patched=_ended(proof.patched for proof in runs),
                )
    return found


def unproved(cell: Cell, series: Iterable[Series], proofs: Sequence[Proof]) -> list[str]:
    """The patches of a cell of which no test failed on the package as released and passed on ours.

    Only of a CPU cell: on others a patch that lets the CPU do something has nothing to show.
    """
    if cell.accelerator.kind != "cpu":
        return []
    shown = {
        proof.file
        for proof in proofs
        if not proof.pristine.startswith(PASSED) and proof.patched.startswith(PASSED)
    }
    return [f"{s.package}/{p.name}" for s in series for p in s.patches if p.header["Test"] not in shown]


def report(cell: Cell, series: Sequence[Series], proofs: Sequence[Proof], console: Console) -> int:
    """Print the table of a cell; 1 if a patch of it is not proved."""
    found = proofs_of(series, proofs)
    table = Table("patch", "as released", "patched", title=cell.id)
    for name in (f"{s.package}/{patch.name}" for s in series for patch in s.patches):
        proved = found.get(name)
        table.add_row(name, *((proved.pristine, proved.patched) if proved else ("not tried", "")))
    console.print(table)
    lacking = unproved(cell, series, proofs)
    for name in lacking:
        console.print(
            f"error: {name}: no test failed without it and passed with it on this cell: its header's Test "
            "must name a file in which one does",
            markup=False,
            soft_wrap=True,
        )
    return 1 if lacking else 0


def _ended(outcomes: Iterable[str]) -> str:
    """``exit 1: ImportError: ...`` as what it came to, without a text that names places."""
    outcomes = list(outcomes)
    failed = [outcome for outcome in outcomes if not outcome.startswith(PASSED)]
    causes = sorted({cause[1] for outcome in failed if (cause := CAUSE.search(outcome))})
    words = ["passes"] if len(failed) < len(outcomes) else []
    if failed:
        words.append(f"fails ({', '.join(causes)})" if causes else "fails")
    return ", ".join(words)
