"""What became of a run that a fault hit: a case for each fault in each phase, and the table of them.

``nox -s faults`` runs the cases (tests/faults), each of which leaves a file in ``build/faults/<cell>/``.
``python -m scripts.release.fault_cases`` puts those into ``images/faults.json`` and writes the catalogue's page again.
"""

import argparse
import datetime
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from scripts.errors import UserError, run
from scripts.paths import ROOT
from scripts.release.markdown import table_of

KEPT = ROOT / "images" / "faults.json"
CASES = ROOT / "build" / "faults"
START, GENERATION, SYNC, TRAINING = "engine start", "generation", "sync", "training"
PHASES = (START, GENERATION, SYNC, TRAINING)
Outcome = Literal["ended", "goes on", "hangs"]
FAULTS = {
    "node killed": PHASES,
    "process killed": PHASES,
    "link cut": PHASES,
    "node paused": PHASES,
    "disk of the checkpoints full": (TRAINING,),
    "head restarted": PHASES,
    "link slowed to 4 Mbit/s": PHASES,
    "shared memory full": PHASES,
    "memory limit hit": PHASES,
}
COLUMNS = ("fault", "during", "the run", "what is said", "names the node", "left behind", "afterwards")
INTRODUCTION = """## Faults

A run of OpenRLHF's own trainer on five containers as nodes: the head, the engine, two ranks of the trainer
that share the optimiser's states, each on its own, and a machine from which `rlhf-stack submit` follows it.
It saves a checkpoint after every step. OpenRLHF 0.5.1 has a critic and a reward model too, on a sixth. The
link to the engine is slowed until a fault in a sync is there, as a sync of the tiny model ends at once. The
fault hits the node of the engine and, in training, that of the trainer's second rank. *The run* ends with
an error, goes on (it does further steps while the fault lasts), or hangs; the seconds are those from the
fault to the end of the job. *Left behind* is what still runs or is reserved half a minute after the fault
was mended: processes, segments of shared memory, actors, placement groups. `rlhf-stack reap --yes` has to
end all of it before the run goes on. *Afterwards* is what the same command does when it is submitted again.
`nox -s faults` runs them; the deadline of a sync was 20 s, Ray's own were as Ray has them.
"""


class Case(msgspec.Struct, frozen=True):
    """One fault in one phase of a run. ``revision`` is the commit of the tests.

    ``in_time`` says whether the phase still lasted when the fault was complete.
    """

    cell: str
    image: str
    revision: str
    when: datetime.datetime
    fault: str
    phase: str
    outcome: Outcome
    seconds: float
    said: str
    node_named: bool
    left: tuple[str, ...]
    in_time: bool = True
    afterwards: str = "not tried"


def write(case: Case, cases: Path = CASES) -> None:
    """Keep a case, in place of an older one."""
    name = "-".join(f"{case.fault} {case.phase}".replace("/", " ").split())
    path = cases / case.cell / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(case), indent=2) + b"\n")


def load(path: Path = KEPT) -> list[Case]:
    """The cases that the catalogue has; a `UserError` if the file is not what we wrote."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Case]) if path.exists() else []
    except msgspec.DecodeError as error:
        raise UserError(f"{path.name}: {error}; it is written by `nox -s faults`, not by hand") from None


def merged(known: Iterable[Case], new: Iterable[Case]) -> list[Case]:
    """Of each cell, fault and phase the newest case, in the order of `FAULTS`; one that is not there goes."""
    newest: dict[tuple[str, str, str], Case] = {}
    for case in sorted((*known, *new), key=lambda case: case.when):
        newest[case.cell, case.fault, case.phase] = case
    cells = sorted({case.cell for case in newest.values()})
    wanted = ((cell, fault, phase) for cell in cells for fault, phases in FAULTS.items() for phase in phases)
    return [newest[key] for key in wanted if key in newest]


def section(cases: Sequence[Case]) -> str:
    """The part of the catalogue's page: a table for each cell that was tried; empty if none was."""
    parts = []
    for cell in dict.fromkeys(case.cell for case in cases):
        own = {(case.fault, case.phase): case for case in cases if case.cell == cell}
        rows = [
            (fault, _during(phase, own.get((fault, phase))), *_told(own.get((fault, phase))))
            for fault, phases in FAULTS.items()
            for phase in phases
        ]
        hung = sum(case.outcome == "hangs" for case in own.values())
        left = sum(bool(case.left) for case in own.values())
        images = sorted({f"`{case.image.removeprefix('sha256:')[:12]}`" for case in own.values()})
        parts.append(
            f"`{cell}`, image {', '.join(images)}: {len(own)} of {len(rows)} cases were run, "
            f"{hung} hung, {left} left something behind.\n\n{table_of(COLUMNS, rows)}"
        )
    return "\n".join([INTRODUCTION, *parts]) if parts else ""


def _during(phase: str, case: Case | None) -> str:
    return phase if case is None or case.in_time else f"{phase}, which had just ended"


def _told(case: Case | None) -> tuple[str, ...]:
    if case is None:
        return ("not run", *[""] * 4)
    outcome = {
        "ended": f"ends after {case.seconds:.0f} s",
        "goes on": "goes on",
        "hangs": f"**hangs** (given up after {case.seconds:.0f} s)",
    }[case.outcome]
    named = "" if case.outcome == "goes on" else "yes" if case.node_named else "no"
    said = f"`{case.said.replace('`', chr(39))}`" if case.said else ""
    return outcome, said, named, "; ".join(case.left) or "nothing", case.afterwards


def main() -> int:
    """The command line."""
    from scripts.release import catalogue  # noqa: PLC0415  (it reads the cases by this module)

    argparse.ArgumentParser(
        prog="python -m scripts.release.fault_cases", description=(__doc__ or "").split("\n")[0]
    ).parse_args()
    files = sorted(CASES.glob("*/*.json"))
    cases = merged(load(), [msgspec.json.decode(file.read_bytes(), type=Case) for file in files])
    KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(cases), indent=1) + b"\n")
    catalogue.write_texts()
    print(f"{KEPT.relative_to(ROOT)}: {len(cases)} cases")
    return 0


if __name__ == "__main__":
    run(main)
