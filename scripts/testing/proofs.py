"""How the tests of the patches ended: on the series without the patch alone, and on the whole series."""

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
    """The outcomes of a patch's tests without this patch alone, and with it."""

    without: str
    patched: str


def proofs_of(series: Iterable[Series], proofs: Sequence[Proof]) -> dict[str, Proved]:
    """The outcomes of each patch's tests by ``package/name``, without patches whose test did not run."""
    found = {}
    for s in series:
        for patch in s.patches:
            runs = [proof for proof in proofs if proof.patch == s.id_of(patch)]
            if runs:
                found[f"{s.package}/{patch.name}"] = Proved(
                    without=_ended(proof.without for proof in runs),
                    patched=_ended(proof.patched for proof in runs),
                )
    return found


def unproved(cell: Cell, series: Iterable[Series], proofs: Sequence[Proof]) -> list[str]:
    """The patches without a test that failed without this patch alone and passed with it.

    Only CPU cells are checked: on others, a patch that adds CPU support makes no difference.
    """
    if cell.accelerator.kind != "cpu":
        return []
    proved = {
        proof.patch
        for proof in proofs
        if not proof.without.startswith(PASSED) and proof.patched.startswith(PASSED)
    }
    return [f"{s.package}/{p.name}" for s in series for p in s.patches if s.id_of(p) not in proved]


def report(cell: Cell, series: Sequence[Series], proofs: Sequence[Proof], console: Console) -> int:
    """Print the table of a cell; 1 if one of its patches is not proved."""
    found = proofs_of(series, proofs)
    table = Table("patch", "without it alone", "with it", title=cell.id)
    for name in (f"{s.package}/{patch.name}" for s in series for patch in s.patches):
        proved = found.get(name)
        table.add_row(name, *((proved.without, proved.patched) if proved else ("not tested", "")))
    console.print(table)
    missing = unproved(cell, series, proofs)
    for name in missing:
        console.print(
            f"error: {name}: no test failed without it and passed with it on this cell: prove it, restrict "
            "its Cells, or drop it",
            markup=False,
            soft_wrap=True,
        )
    return 1 if missing else 0


def _ended(outcomes: Iterable[str]) -> str:
    """Summarize outcomes such as ``exit 1: ImportError: ...``, without text that depends on paths."""
    outcomes = list(outcomes)
    failed = [outcome for outcome in outcomes if not outcome.startswith(PASSED)]
    causes = sorted({cause[1] for outcome in failed if (cause := CAUSE.search(outcome))})
    words = ["passes"] if len(failed) < len(outcomes) else []
    if failed:
        words.append(f"fails ({', '.join(causes)})" if causes else "fails")
    return ", ".join(words)
