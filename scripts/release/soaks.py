"""The reports of runs under many faults (`tests.bench.soak`), each next to the undisturbed run.

A soak writes ``build/soak/<cell>/<run>/report.json`` and ``timeline.png``. ``python -m scripts soaks`` copies
them to ``images/soaks/``, where files are only added: a name has the digest of the report's content.
"""

import datetime
import functools
import shutil
import statistics
from pathlib import Path

import msgspec

from scripts.digests import sha256, sha256_file
from scripts.errors import UserError
from scripts.paths import ROOT
from scripts.testing.records import DIGITS, encode
from scripts.testing.suite_digest import closure

COMMITTED = ROOT / "images" / "soaks"
REPORTS = ROOT / "build" / "soak"
REPORT, TIMELINE = "report.json", "timeline.png"
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
    """Copy the reports and plots that are not in ``committed``; return how many."""
    known = load(committed)
    added = 0
    for file in sorted(reports.glob(f"*/*/{REPORT}")):
        soak = msgspec.json.decode(file.read_bytes(), type=Soak)
        if (name := _name(soak)) not in known:
            committed.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.with_name(TIMELINE), committed / f"{name}.png")
            (committed / f"{name}.json").write_bytes(encode(soak))
            added += 1
    return added


def load(committed: Path = COMMITTED) -> dict[str, Soak]:
    """Return the soaks by name, in the order of cells and time; `UserError` names one that was changed."""
    found = {}
    for file in committed.glob("*.json"):
        try:
            found[file.stem] = msgspec.json.decode(file.read_bytes(), type=Soak)
        except msgspec.DecodeError as error:
            raise UserError(f"{file}: not the report of a soak ({error}): restore it") from None
        if file.stem != _name(found[file.stem]):
            raise UserError(f"{file}: it was changed, since its name has another digest: restore it")
    return dict(sorted(found.items(), key=lambda item: (item[1].cell, item[1].when)))


def _name(soak: Soak) -> str:
    return f"{soak.cell}-seed-{soak.seed}-{sha256(encode(soak))[:DIGITS]}"
