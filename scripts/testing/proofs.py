"""How the tests of the patches ended: on the series without the patch alone, and on the whole series."""

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from scripts.matrix.load import Cell
from scripts.patches.series import Series
from scripts.paths import ROOT
from scripts.testing.records import Executed, Proof, Tally

CAUSE = re.compile(r"\b([A-Z]\w*(?:Error|Exception|Exit|Timeout|Expired))\b")
PASSED = "exit 0"
NOT_EXECUTED = ROOT / "tests" / "patches" / "not_executed.toml"


class Proved(msgspec.Struct, frozen=True):
    """The outcomes of a patch's tests without this patch alone, and with it, and what the tests replaced."""

    without: str
    patched: str
    stubs: tuple[str, ...] = ()


def proofs_of(series: Iterable[Series], proofs: Sequence[Proof]) -> dict[str, Proved]:
    """The outcomes of each patch's tests by ``package/name``, without patches whose test did not run."""
    found = {}
    for s in series:
        for patch in s.patches:
            of_patch = [proof for proof in proofs if proof.patch == s.id_of(patch)]
            runs = [proof for proof in of_patch if not proof.skipped]
            if runs:
                found[f"{s.package}/{patch.name}"] = Proved(
                    without=_ended(proof.without for proof in runs),
                    patched=_ended(proof.patched for proof in runs),
                    stubs=tuple(sorted({stub for proof in runs for stub in proof.stubs})),
                )
            elif of_patch:
                found[f"{s.package}/{patch.name}"] = Proved(f"skipped: {of_patch[0].skipped}", "")
    return found


def executed_of(series: Iterable[Series], suites: Sequence[Mapping[str, Executed]]) -> dict[str, Executed]:
    """Which changes of each patch, by ``package/name``, one of the suites executed."""
    found = {}
    for s in series:
        for patch in s.patches:
            if parts := [suite[s.id_of(patch)] for suite in suites if s.id_of(patch) in suite]:
                missed = set.intersection(*(set(part.missed) for part in parts))
                found[f"{s.package}/{patch.name}"] = Executed(parts[0].changes, tuple(sorted(missed)))
    return found


def unproved(cell: Cell, series: Iterable[Series], proofs: Sequence[Proof]) -> list[str]:
    """The patches without a test that failed without this patch alone and passed with it.

    In an image for GPUs its tests may be skipped instead, for one of the suite's reasons: a patch for the CPU
    changes nothing there.
    """
    proved = {
        proof.patch
        for proof in proofs
        if (proof.without and not proof.without.startswith(PASSED) and proof.patched.startswith(PASSED))
        or (proof.skipped and cell.accelerator.kind != "cpu")
    }
    return [f"{s.package}/{p.name}" for s in series for p in s.patches if s.id_of(p) not in proved]


def reasons() -> dict[str, dict[str, str]]:
    """Why the suite executes some changes in no cell, by the id of the patch and the change."""
    return tomllib.loads(NOT_EXECUTED.read_text(encoding="utf-8"))


def unexplained(executed: Mapping[str, Executed], excuses: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What is wrong with the ``excuses`` for changes that the suite does not execute, by patch and change."""
    missed = {(patch, change) for patch, found in executed.items() for change in found.missed}
    excused = {(patch, change) for patch in executed for change in excuses.get(patch, ())}
    name = NOT_EXECUTED.relative_to(ROOT)
    return [
        *(f"{patch}: no test executed {change}: extend one" for patch, change in sorted(missed - excused)),
        *(
            f"{name}: {patch} {change} was executed or is no change"
            for patch, change in sorted(excused - missed)
        ),
    ]


def report(cell: Cell, series: Sequence[Series], tally: Tally, console: Console) -> int:
    """Print the table of a cell; 1 if one of its patches is not proved.

    In a cell for CPUs each change has to be executed, or be in `NOT_EXECUTED` with the reason.
    """
    found, executed = proofs_of(series, tally.proofs), executed_of(series, [tally.executed])
    excuses = reasons()
    table = Table("patch", "without it alone", "with it", "changes executed", title=cell.id)
    for s in series:
        for patch in s.patches:
            name = f"{s.package}/{patch.name}"
            proved = found.get(name)
            outcomes = (proved.without, proved.patched) if proved else ("not tested", "")
            table.add_row(name, *outcomes, described(executed.get(name), excuses.get(s.id_of(patch), {})))
    console.print(table)
    errors = [
        f"{name}: no test failed without it and passed with it on this cell: prove it or drop it"
        for name in unproved(cell, series, tally.proofs)
    ]
    if cell.accelerator.kind == "cpu" and not cell.stand_in:
        errors += unexplained(tally.executed, excuses)
    for error in errors:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
    return 1 if errors else 0


def described(executed: Executed | None, excuses: Mapping[str, str]) -> str:
    """How many changes of a patch were executed, and which were not, with the reason if there is one."""
    if executed is None:
        return ""
    missed: dict[str, list[str]] = {}
    for change in executed.missed:
        missed.setdefault(excuses.get(change, ""), []).append(change)
    parts = [
        f"not {', '.join(changes)}{reason and f' ({reason})'}" for reason, changes in sorted(missed.items())
    ]
    return ", ".join([f"{executed.changes - len(executed.missed)} of {executed.changes}", *parts])


def _ended(outcomes: Iterable[str]) -> str:
    """Summarize outcomes such as ``exit 1: ImportError: ...``, without text that depends on paths."""
    outcomes = list(outcomes)
    failed = [outcome for outcome in outcomes if not outcome.startswith(PASSED)]
    causes = sorted({cause[1] for outcome in failed if (cause := CAUSE.search(outcome))})
    words = ["passes"] if len(failed) < len(outcomes) else []
    if failed:
        words.append(f"fails ({', '.join(causes)})" if causes else "fails")
    return ", ".join(words)
