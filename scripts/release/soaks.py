"""The reports of runs under many faults (`tests.bench.soak`), each next to the undisturbed run.

A soak writes ``build/soak/<cell>/<run>/report.json`` and ``timeline.png``. ``python -m scripts soaks`` copies
them to ``images/soaks/``, where files are only added: the name of the two has the digest of their contents.
"""

import datetime
import functools
import statistics
from pathlib import Path

import msgspec

from scripts.digests import sha256, sha256_file
from scripts.errors import UserError
from scripts.paths import ROOT
from scripts.testing.records import DIGITS, decode, encode
from scripts.testing.suite_digest import closure

COMMITTED = ROOT / "images" / "soaks"
REPORTS = ROOT / "build" / "soak"
REPORT, TIMELINE, PLOT = "report.json", "timeline.png", ".png"
PROGRAM = ROOT / "tests" / "bench" / "soak.py"
LIMIT = 2.5  # times the undisturbed run; a run that takes longer does not fail


class Fault(msgspec.Struct, frozen=True):
    """A fault at ``began``, in seconds after the run began; ``seconds`` is how long it lasted."""

    kind: str
    node: str
    began: float
    seconds: float


class Soak(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of ``steps`` steps under the faults of ``seed``, compared with an undisturbed one.

    ``inputs`` is the digest of the image's inputs, ``tests`` that of the soak's own code (`tests`),
    ``revision`` the commit. ``when`` and ``undisturbed_when`` are the starts of the runs, ``seconds`` their
    wall times, that under faults first. ``ended`` is the exit code under faults, ``left`` what it left
    behind, and ``recoveries`` are the seconds of each restart of an engine.
    """

    cell: str
    image: str
    inputs: str
    tests: str
    revision: str
    when: datetime.datetime
    undisturbed_when: datetime.datetime
    steps: int
    seed: int
    ended: int
    seconds: tuple[float, float]
    same_rewards: bool
    same_weights: bool
    left: tuple[str, ...]
    submissions: int
    steps_repeated: int
    prompts_again: int
    recoveries: tuple[float, ...]
    faults: tuple[Fault, ...]

    @property
    def ratio(self) -> float:
        """How many times as long as the undisturbed run it took."""
        return self.seconds[0] / self.seconds[1]

    @property
    def time(self) -> str:
        """Its time relative to the undisturbed run, and whether `LIMIT` was met."""
        met = "met" if self.ratio <= LIMIT else "not met"
        return f"{self.ratio:.2f} times the undisturbed run; limit {LIMIT:g}: {met}"

    @property
    def median_restart(self) -> float:
        """The median of ``recoveries``, 0 without any."""
        return statistics.median(self.recoveries or [0.0])

    @property
    def failures(self) -> list[str]:
        """Why the run did not end as the undisturbed one; empty if it did."""
        return [
            *([f"ended with exit code {self.ended}"] if self.ended else []),
            *([] if self.same_rewards else ["other rewards"]),
            *([] if self.same_weights else ["other weights"]),
            *([f"left behind: {', '.join(self.left)}"] if self.left else []),
        ]


@functools.cache
def tests() -> str:
    """Return the sha256 of the soak's code in this checkout: its module and all that it imports."""
    content = {str(file.relative_to(ROOT)): sha256_file(file) for file in closure([PROGRAM])}
    return sha256(msgspec.json.encode(content, order="sorted"))


def add(reports: Path = REPORTS, committed: Path = COMMITTED) -> int:
    """Copy the reports that are not in ``committed``, with their plots; return how many.

    `UserError` names a report that is not of the structure of `Soak`, as older ones are.
    """
    known = list(load(committed).values())
    found = [
        (file, _read(file, "remove it, or run the soak again")) for file in reports.glob(f"*/*/{REPORT}")
    ]
    new = [(soak, file.with_name(TIMELINE).read_bytes()) for file, soak in found if soak not in known]
    for soak, plot in new:
        name = _name(soak, plot)
        committed.mkdir(parents=True, exist_ok=True)
        (committed / f"{name}{PLOT}").write_bytes(plot)
        (committed / f"{name}.json").write_bytes(encode(soak))
    return len(new)


def load(committed: Path = COMMITTED) -> dict[str, Soak]:
    """Return the soaks by name, in the order of cells and time; `UserError` names one that was changed."""
    found = {}
    for file in committed.glob("*.json"):
        soak, plot = _read(file, "restore it"), file.with_suffix(PLOT)
        if not plot.exists() or file.stem != _name(soak, plot.read_bytes()):
            raise UserError(f"{file}: it or its plot was changed, renamed or removed: restore them")
        found[file.stem] = soak
    return dict(sorted(found.items(), key=lambda item: (item[1].cell, item[1].when)))


def _read(file: Path, remedy: str) -> Soak:
    try:
        return decode(file.read_bytes(), Soak)
    except msgspec.DecodeError as error:
        raise UserError(f"{file}: not the report of a soak ({error}): {remedy}") from None


def _name(soak: Soak, plot: bytes) -> str:
    return f"{soak.cell}-seed-{soak.seed}-{sha256(encode(soak) + plot)[:DIGITS]}"
