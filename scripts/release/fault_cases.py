"""The outcomes of runs into which faults are injected: a case for each fault in each phase.

``nox -s faults`` runs the cases (tests/faults), each of which writes a file to ``build/faults/<cell>/``.
``python -m scripts fault-table`` merges them into ``images/faults.json`` and rewrites the catalogue's page.
"""

import datetime
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec
from rlhf_stack.demo import tiny_run

from scripts.digests import sha256
from scripts.errors import UserError
from scripts.git import history
from scripts.matrix.load import Cell
from scripts.paths import ROOT
from scripts.processes import captured
from scripts.release import facts
from scripts.testing.records import COMMITTED, decode, encode

MERGED = ROOT / "images" / "faults.json"
CASES = ROOT / "build" / "faults"
START, GENERATION, SYNC, TRAINING = "engine start", "generation", "sync", "training"
SEPARATE, HYBRID = "separate", "hybrid"  # layouts: engines on GPUs of their own, or on the trainer's
PHASES = (START, GENERATION, SYNC, TRAINING)
Outcome = Literal["ended", "goes on", "hangs"]
WORST_FIRST: tuple[Outcome, ...] = ("hangs", "ended", "goes on")
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
# Layout, fault and phase of every case of a cell.
ORDER = [
    (layout, fault, phase)
    for layout in (SEPARATE, HYBRID)
    for fault, phases in FAULTS.items()
    for phase in phases
]


class Case(msgspec.Struct, frozen=True, omit_defaults=True):
    """The outcome of one fault in one phase of a run.

    ``revision`` is the commit of the tests, ``tests`` their digest, ``inputs`` that of the image's inputs;
    older cases lack both digests. ``said`` is the error of the run, ``left`` the resources that were left
    behind, None while the run went on. ``in_time`` is False if the phase had ended before the fault was
    complete.

    Of a run that goes on: ``after`` are the seconds until its next step ended, ``repaired`` whether the fault
    had been removed by then, as a service manager restarts a node, ``submissions`` how often its `submit`
    submitted it again, and ``equal`` whether its rewards are those of the undisturbed run (None: unknown).
    ``refused`` counts submissions that the test repeated because a dead node was not yet known.
    ``prompts_again`` is counted from the run's events; in cases without ``tests`` it was computed.
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
    left: tuple[str, ...] | None
    in_time: bool = True
    afterwards: str = "not tried"
    after: float | None = None
    repaired: bool = False
    submissions: int = 0
    steps_lost: int = 0
    prompts_again: int = 0
    equal: bool | None = None
    refused: int = 0
    layout: str = SEPARATE
    tests: str = ""
    inputs: str = ""


class Merged(msgspec.Struct, frozen=True):
    """The cases of the catalogue, with the sha256 of their JSON, by which an edit is detected."""

    sha256: str
    cases: tuple[Case, ...]


def write(case: Case, cases: Path = CASES) -> None:
    """Write a case, next to earlier attempts; it replaces what was written of the same attempt."""
    words = f"{case.layout} {case.fault} {case.phase} {case.when:%Y%m%dT%H%M%S}"
    name = "-".join(words.replace("/", " ").split())
    path = cases / case.cell / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(encode(case))
    unfinished.rename(path)


def load(path: Path = MERGED) -> list[Case]:
    """Return the catalogue's cases; `UserError` if the file was edited or has another structure."""
    if not path.exists():
        return []
    try:
        merged = decode(path.read_bytes(), Merged)
        wrong = "" if merged == _merged(merged.cases) else "its cases have another sha256"
    except msgspec.DecodeError as error:
        wrong = str(error)
    if wrong:
        raise UserError(
            f"{path.name}: {wrong}; it is written by `python -m scripts fault-table`, do not edit it"
        )
    return list(merged.cases)


def save(cases: Iterable[Case], path: Path = MERGED) -> None:
    """Write the catalogue's cases."""
    path.write_bytes(encode(_merged(cases)))


def _merged(cases: Iterable[Case]) -> Merged:
    cases = tuple(cases)
    return Merged(sha256(msgspec.json.encode(cases)), cases)


def merge(known: Iterable[Case], new: Iterable[Case], built: Mapping[str, str]) -> list[Case]:
    """Return all attempts of each `case_key`, by time, in the order of `FAULTS`; drop other faults.

    All cases of a cell are of the same inputs, those of its newest case; others are dropped (see `inputs_of`
    for ``built``). What a test recorded later about the same attempt replaces it.
    """
    attempts = {(case_key(case), case.when): case for case in of_same_inputs((*known, *new), built)}
    kept = (case for case in attempts.values() if case_key(case)[1:] in ORDER)
    return sorted(kept, key=lambda case: (case.cell, ORDER.index(case_key(case)[1:]), case.when))


def case_key(case: Case) -> tuple[str, str, str, str]:
    """Return what identifies a case in the table: cell, layout, fault and phase."""
    return case.cell, case.layout, case.fault, case.phase


def layouts(cell: Cell) -> tuple[str, ...]:
    """The layouts in which faults hit the runs of a cell; OpenRLHF 0.5 has no hybrid one."""
    has_hybrid = HYBRID in tiny_run.installed(cell.package("openrlhf").version).layouts
    return (SEPARATE, HYBRID) if has_hybrid else (SEPARATE,)


def of_same_inputs(cases: Iterable[Case], built: Mapping[str, str]) -> list[Case]:
    """Return the cases, by time, of each cell's newest image and of images that have its inputs."""
    ordered = sorted(cases, key=lambda case: case.when)
    newest = {case.cell: inputs_of(case, built) for case in ordered}
    return [case for case in ordered if inputs_of(case, built) == newest[case.cell]]


def inputs_of(case: Case, built: Mapping[str, str]) -> str:
    """Return the digest of the inputs of a case's image.

    Older cases lack it: theirs is in ``built``, by the image's id, or the image has inputs of its own.
    """
    return case.inputs or built.get(case.image, case.image)


def update() -> int:
    """Merge the new cases into `MERGED` and return the number of cases.

    A `UserError` names a file that is no whole case, and the files of older cases, without inputs, of images
    that were not measured: which cases they replace is unknown.
    """
    new = {file: _read(file) for file in sorted(CASES.glob("*/*.json"))}
    built = facts.inputs_of_images()
    if unknown := [file.name for file, case in new.items() if not case.inputs and case.image not in built]:
        raise UserError(
            f"{', '.join(unknown)} in {CASES}: written before cases had the inputs of their image, which was "
            "not measured: run python -m scripts catalogue, then fault-table; or remove them"
        )
    cases = merge(load(), new.values(), built)
    save(cases)
    return len(cases)


def _read(file: Path) -> Case:
    try:
        return decode(file.read_bytes(), Case)
    except msgspec.DecodeError as error:
        raise UserError(f"{file}: not a case ({error}): remove it, or run it again") from None


def removed(root: Path = ROOT) -> list[str]:
    """Return a line for each case of an earlier commit that `MERGED` lacks and `merge` would have kept.

    Versions of another structure, all from before 2026-11-24, are not read. A shallow clone has only the
    history that it fetched. `UserError` if git cannot read it.
    """
    path = root / MERGED.relative_to(ROOT)
    name = str(path.relative_to(root))
    known = load(path)
    commits = history("log", "--full-history", "--reverse", "--format=%H", "--", name, root=root)
    earlier = [case for commit in commits.split() for case in _committed(commit, name, root)]
    kept = {(case_key(case), case.when) for case in known}
    expected = merge(earlier, known, facts.inputs_of_images(root / COMMITTED.relative_to(ROOT)))
    return [
        f"{name}: the case {', '.join(case_key(case))} of {case.when:%Y-%m-%d %H:%M} was removed, and "
        f"attempts are only added: git log -- {name}"
        for case in expected
        if (case_key(case), case.when) not in kept
    ]


def _committed(commit: str, name: str, root: Path) -> tuple[Case, ...]:
    """Return the cases of the file ``name`` in ``commit``; none if it is not there, or cannot be read."""
    text = captured(["git", "show", f"{commit}:{name}"], root).stdout
    try:
        return msgspec.json.decode(text, type=Merged).cases
    except msgspec.DecodeError:
        return ()
