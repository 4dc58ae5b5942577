"""The generated pages: ``images/README.md``, and the README's table of cells."""

import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from packaging.version import Version

from scripts.errors import UserError
from scripts.git import DIRTY
from scripts.images.source import source_digest
from scripts.matrix.load import Cell
from scripts.matrix.model import Accelerator
from scripts.matrix.suites import SUITES
from scripts.patches.series import series_of
from scripts.release import certificates, facts, fault_cases, published_scripts, soaks, works_with
from scripts.release.facts import Facts, SuiteResult
from scripts.release.fault_cases import ORDER, WORST_FIRST, Case, case_key, inputs_of, of_same_inputs
from scripts.release.soaks import Soak
from scripts.testing import proofs, records
from scripts.testing.acceptance import undeclared
from scripts.testing.suite_digest import suite_digest

BEGIN = "<!-- cells: begin, written by python -m scripts catalogue -->"
END = "<!-- cells: end -->"
COLUMNS = ("GPU", "driver", "tag", "status")
OVERVIEW_COLUMNS = ("cell", "image", "state", "size", "shared", "own", "architectures", "supported")
SUITE_COLUMNS = (
    "suite",
    "outcome",
    "passed",
    "failed",
    "skipped",
    "seconds",
    "attempts",
    "date",
    "commit",
    "image",
    "reservations",
)
FAULT_COLUMNS = (
    "layout",
    "fault",
    "during",
    "attempts",
    "the run",
    "continues by itself after",
    "steps lost",
    "prompts generated again",
    "equal to the undisturbed run",
    "error",
    "names the node",
    "left behind",
    "afterwards",
    "reservations",
)
SOAK_COLUMNS = (
    "cell",
    "image",
    "date",
    "seed",
    "steps",
    "faults",
    "submissions",
    "restarts of engines",
    "median restart, s",
    "steps repeated",
    "prompts generated again",
    "seconds under faults / undisturbed",
    "time",
    "outcome",
    "timeline",
    "reservations",
)
GPUS_FIRST = ("cuda", "rocm", "cpu")
NO_RECORDS, RECIPE_ONLY = "not verified: there are no records of an image", "recipe only, never built"
NOT_YET = "not verified yet: its sources changed; with the inputs before, `{}`: {}"
UNKNOWN = "?"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; bars in fields are escaped."""
    lines = [header, ("---",) * len(header), *rows]
    return "".join(
        f"| {' | '.join(field.replace('|', chr(92) + '|') for field in line)} |\n" for line in lines
    )


def fill(text: str, cells: Iterable[Cell], known: Mapping[str, Facts]) -> str:
    """Replace the README's table between the markers; `UserError` without both markers, in order."""
    published = sorted((cell for cell in cells if not cell.stand_in), key=_reading_order)
    rows = table(COLUMNS, (row(cell, known) for cell in published))
    return replace_between(text, BEGIN, END, f"\n{rows}\n", "README.md")


def replace_between(text: str, begin: str, end: str, new: str, name: str) -> str:
    """Replace what is between two marker lines of the file ``name``; `UserError` without both, in order."""
    before, has_begin, rest = text.partition(begin)
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise UserError(f"{name}: expected the lines {begin!r} and {end!r}")
    return f"{before}{begin}\n{new}{end}{after}"


def row(cell: Cell, known: Mapping[str, Facts]) -> tuple[str, ...]:
    """Return the README's row of a cell, in the order of `COLUMNS`."""
    tag = f"`{cell.id}`{' (default)' if cell.is_default else ''}"
    return _gpus(cell.accelerator), _driver(cell.accelerator), tag, status(cell, known)


def _gpus(accelerator: Accelerator) -> str:
    """The GPUs of an accelerator's cells, in words."""
    gpus = accelerator.gpus
    if gpus is None:
        return "none"
    if accelerator.kind == "cuda":
        return f"NVIDIA, compute capability {' to '.join(gpus.architectures)} ({gpus.models})"
    return f"AMD {' and '.join(gpus.architectures)} ({gpus.models})"


def _driver(accelerator: Accelerator) -> str:
    """The driver that an accelerator's cells require, in words."""
    if accelerator.driver is None:
        return "none"
    oldest = accelerator.driver.oldest
    return f"NVIDIA {oldest} or newer" if accelerator.kind == "cuda" else oldest


def status(cell: Cell, known: Mapping[str, Facts]) -> str:
    """Return in a few words whether a cell was built and tested, and on what."""
    measured = known.get(cell.id)
    if measured is None:
        return RECIPE_ONLY if cell.sources else NO_RECORDS
    failed, absent = _failed(measured), _absent(cell, measured)
    noun = "test" if measured.passed == 1 else "tests"
    tests = f"{measured.passed} {noun} passed on a CPU" if measured.passed else "no test"
    if failed:
        tests = f"failed: {', '.join(failed)}"
    not_run = [f"not run: {', '.join(absent)}"] if absent else []
    if not facts.is_current(cell, measured):
        return "; ".join([NOT_YET.format(_short(measured.inputs), tests), *not_run])
    doubtful = [name for name, suite in measured.suites.items() if reservations(name, suite)]
    parts = [f"built here, {tests}", *not_run]
    parts += [f"with reservations: {', '.join(doubtful)}"] if doubtful else []
    ran = certificates.of_cell(certificates.load(), cell.id, measured.inputs)
    never = [] if cell.accelerator.kind == "cpu" else ["this build never ran on a GPU"]
    return "; ".join([*parts, *([ran] if ran else never)])


def _failed(measured: Facts) -> list[str]:
    """Return the suites that did not pass on a cell's image."""
    return sorted(name for name, suite in measured.suites.items() if suite.outcome != "passed")


def _absent(cell: Cell, measured: Facts) -> list[str]:
    """Return the required suites that were not run on a cell's image."""
    return [name for name in records.required(cell) if name not in measured.suites]


def reservations(name: str, suite: SuiteResult) -> list[str]:
    """Return why the result of a suite proves less than it says, although its record is a true one."""
    return [
        *_of_tests(suite.tests, _tests(name), suite.revision),
        *([f"{suite.most} of the same tests passed before"] if suite.passed < suite.most else []),
        *(f"undeclared reason for a skip: {reason}" for reason in undeclared(name, suite.skips)),
    ]


def case_reservations(case: Case) -> list[str]:
    """Return why a case of the table of faults proves less than it says."""
    return _of_tests(case.tests, _tests("faults"), case.revision)


def _of_tests(tests: str, current: str, revision: str) -> list[str]:
    """Return what is to be said about the tests of a result, with digest ``tests``, "" if unknown."""
    changed = "its tests changed since" if tests else "its tests are unknown"
    return [
        *([changed] if tests != current else []),
        *(["uncommitted changes"] if revision.endswith(DIRTY) else []),
    ]


@functools.cache
def _tests(name: str) -> str:
    return suite_digest(name)


def page(
    cells: Sequence[Cell],
    known: Mapping[str, Facts],
    cases: Sequence[Case] = (),
    found: Mapping[str, Soak] = MappingProxyType({}),
) -> str:
    """Return the text of ``images/README.md``."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=False,  # noqa: S701  (Markdown)
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    current = {
        cell.id: known[cell.id].inputs
        for cell in cells
        if cell.id in known and facts.is_current(cell, known[cell.id])
    }
    built = facts.inputs_of_images()
    layouts = {cell.id: fault_cases.layouts(cell) for cell in cells}
    text = environment.get_template("images.md.j2").render(
        table=table,
        overview_columns=OVERVIEW_COLUMNS,
        overview=[_overview(cell, known) for cell in cells],
        suites=[(name, suite.title) for name, suite in SUITES.items()],
        suite_columns=SUITE_COLUMNS,
        fault_columns=FAULT_COLUMNS,
        faults=[
            fault_table(cell, cases, current.get(cell, ""), built, layouts.get(cell, ()))
            for cell in dict.fromkeys(case.cell for case in cases)
        ],
        soak_columns=SOAK_COLUMNS,
        soaks=[soak_row(name, soak, current.get(soak.cell, "")) for name, soak in found.items()],
        certificate_columns=certificates.COLUMNS,
        certificates=certificates.rows(certificates.load()),
        script_columns=published_scripts.COLUMNS,
        scripts=published_scripts.rows(),
        works_with_columns=works_with.COLUMNS,
        works_with=works_with.rows(),
        cells=[_section(cell, known) for cell in cells],
    )
    return f"{text.rstrip()}\n"


def fault_table(
    cell: str,
    cases: Iterable[Case],
    inputs: str = "",
    built: Mapping[str, str] = MappingProxyType({}),
    layouts: Collection[str] = (),
) -> dict[str, Any]:
    """Return the rows of a cell's table of faults, the counts above it, and the cases that were not run.

    ``inputs`` is the digest of those that this checkout gives, if such an image was measured, ``built`` that
    of each measured image, by its id. ``layouts`` are counted also if no case was run in them.
    """
    own: dict[tuple[str, ...], list[Case]] = {}
    for case in of_same_inputs(cases, built):
        if case.cell == cell:
            own.setdefault(case_key(case)[1:], []).append(case)
    every = [key for key in ORDER if key[0] in {*layouts, *(key[0] for key in own)}]
    absent = itertools.groupby((key for key in every if key not in own), key=lambda key: key[:2])
    images = {case.image for attempts in own.values() for case in attempts}
    return {
        "id": cell,
        "images": ", ".join(sorted(f"`{_short(one)}`" for one in images)),
        "tested": len(own),
        "hung": sum(any(case.outcome == "hangs" for case in attempts) for attempts in own.values()),
        "outdated": any(inputs_of(case, built) != inputs for attempts in own.values() for case in attempts),
        "left": sum(any(case.left for case in attempts) for attempts in own.values()),
        "cases": len(every),
        "rows": [(*key[:2], *_case(key[2], own[key])) for key in every if key in own],
        "absent": [
            f"{fault} ({layout}: {', '.join(phase for _, _, phase in keys)})"
            for (layout, fault), keys in absent
        ],
    }


def soak_row(name: str, soak: Soak, inputs: str = "") -> tuple[str, ...]:
    """Return a row in the order of `SOAK_COLUMNS`; ``inputs`` are those of this checkout's image."""
    doubts = [
        *(["**not verified yet**: other inputs"] if soak.inputs != inputs else []),
        *_of_tests(soak.tests, soaks.tests(), soak.revision),
    ]
    return (
        f"`{soak.cell}`",
        f"`{_short(soak.image)}`",
        f"{soak.when:%Y-%m-%d}",
        str(soak.seed),
        str(soak.steps),
        str(len(soak.faults)),
        str(soak.submissions),
        str(len(soak.recoveries)),
        f"{soak.median_restart:.0f}",
        str(soak.steps_repeated),
        str(soak.prompts_again),
        " / ".join(f"{seconds:.0f}" for seconds in soak.seconds),
        soak.time,
        "; ".join(soak.failures) or "passed",
        f"[plot]({soaks.COMMITTED.name}/{name}.png)",
        "; ".join(doubts) or "none",
    )


def megabytes(size: int) -> str:
    """Format a size in bytes as 10^6 bytes."""
    return f"{size / 1e6:.0f} MB"


def _reading_order(cell: Cell) -> tuple[int, list[tuple[int, ...]]]:
    """Sort GPU cells first, and newer versions before older ones."""
    versions = [Version(cell.versions[name]).release for name in ("vllm", "ray")]
    return GPUS_FIRST.index(cell.accelerator.kind), [tuple(-part for part in version) for version in versions]


def _overview(cell: Cell, known: Mapping[str, Facts]) -> tuple[str, ...]:
    link = f"[`{cell.id}`](#{cell.id.replace('.', '').lower()})"
    support = f"{cell.support.since} to {cell.support.until}"
    measured = known.get(cell.id)
    if measured is None:
        return link, status(cell, known), "", *[UNKNOWN] * 4, support
    common = facts.shared(cell.id, known)
    parts = (UNKNOWN, UNKNOWN) if common is None else (megabytes(common), megabytes(measured.size - common))
    image = f"`{_short(measured.image)}`{' **stand-in**' if measured.stand_in else ''}"
    state = "of this checkout" if facts.is_current(cell, measured) else "**not verified yet**"
    architectures = "; ".join(
        f"{name}: {', '.join(found)}" for name, found in sorted(measured.architectures.items())
    )
    return link, image, state, megabytes(measured.size), *parts, architectures or "none: CPU", support


def _section(cell: Cell, known: Mapping[str, Facts]) -> dict[str, Any]:
    measured = known.get(cell.id)
    section = {
        "id": cell.id,
        "versions": ", ".join(f"{package.name} {_version(cell, package.name)}" for package in cell.packages),
        "tested": cell.tested,
        "env": [(f"`{item.name}={item.value}`", item.reason, item.source) for item in cell.env],
        "status": status(cell, known),
        "recipe_only": bool(cell.sources),
        "facts": measured,
    }
    if measured is None:
        return section
    current = facts.is_current(cell, measured)
    absent = _absent(cell, measured)
    return section | {
        "current": current,
        "verified": current and not absent and not _failed(measured),
        "commit": _commit(measured.revision),
        "inputs": _short(measured.inputs),
        "source": _short(measured.source),
        "own_source": _short(source_digest(cell)),
        "results": [(name, *_counts(name, result)) for name, result in measured.suites.items()],
        "skips": [
            (name, reason, str(tests))
            for name, result in measured.suites.items()
            for reason, tests in result.skips.items()
        ],
        "absent": absent,
        "patches": _patches(cell, measured) if current else [],
    }


def _counts(name: str, suite: SuiteResult) -> tuple[str, ...]:
    attempts = f"{suite.attempts}{f', {suite.failed_attempts} failed' if suite.failed_attempts else ''}"
    counts = (suite.passed, suite.failed, sum(suite.skips.values()), round(suite.seconds))
    commit, image = suite.revision[: records.DIGITS], f"`{_short(suite.image)}`"
    doubts = "; ".join(reservations(name, suite)) or "none"
    return suite.outcome, *map(str, counts), attempts, f"{suite.when:%Y-%m-%d}", commit, image, doubts


def _commit(revision: str) -> str:
    dirty = ", **with uncommitted changes**" if revision.endswith(DIRTY) else ""
    return f"{revision.removesuffix(DIRTY)[: records.DIGITS]}{dirty}"


def _patches(cell: Cell, measured: Facts) -> list[tuple[str, ...]]:
    excuses = proofs.reasons()
    ids = {
        f"{s.package}/{p.name}": (p.header["Kind"], s.id_of(p)) for s in series_of(cell) for p in s.patches
    }
    rows = ((name, *ids.get(name, (UNKNOWN, name))) for name in measured.patches)
    return [
        (f"`{name}`", kind, *_proof(measured, name, excuses.get(patch_id, {})))
        for name, kind, patch_id in rows
    ]


def _proof(measured: Facts, patch: str, excuses: Mapping[str, str]) -> tuple[str, ...]:
    proved = measured.proofs.get(patch)
    if not proved:
        return "not tested on this image", UNKNOWN, UNKNOWN, UNKNOWN
    executed = proofs.described(measured.executed.get(patch), excuses) or UNKNOWN
    return proved.without, proved.patched or UNKNOWN, executed, ", ".join(proved.stubs) or "none"


def _version(cell: Cell, name: str) -> str:
    """Return a version, with the distribution if its name differs from the package's."""
    package = cell.package(name)
    own = package.distribution == name
    return package.version if own else f"{package.version} (`{package.distribution}`)"


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[: records.DIGITS]


def _case(phase: str, attempts: Sequence[Case]) -> tuple[str, ...]:
    """Return the last of the attempts at a case, with their number and the worst outcome of all."""
    case = attempts[-1]
    worst = min((one.outcome for one in attempts), key=WORST_FIRST.index)
    note = f", worst: {worst}" if worst != case.outcome else ""
    during = phase if case.in_time else f"{phase}, which had just ended"
    return during, f"{len(attempts)}{note}", *_outcome(case)


def _outcome(case: Case) -> tuple[str, ...]:
    times = "once" if case.submissions == 1 else f"{case.submissions} times"
    again = f", submitted again {times}" if case.submissions else ""
    outcome = {
        "ended": f"ends after {case.seconds:.0f} s",
        "goes on": f"continues{again}",
        "hangs": f"**hangs** (stopped after {case.seconds:.0f} s)",
    }[case.outcome]
    goes_on = case.outcome == "goes on"
    named = "" if goes_on else "yes" if case.node_named else "no"
    error = f"`{case.said.replace('`', chr(39))}`" if case.said else ""
    refused = f" (submissions refused before: {case.refused})" if case.refused else ""
    return (
        outcome,
        *(_recovery(case) if goes_on else ("no", *[""] * 3)),
        error,
        named,
        "" if case.left is None else "; ".join(case.left) or "nothing",
        case.afterwards + refused,
        "; ".join(case_reservations(case)) or "none",
    )


def _recovery(case: Case) -> tuple[str, ...]:
    """Return how a run continued: seconds, steps lost, prompts generated again, equality."""
    if case.after is None:
        return (UNKNOWN,) * 4
    equal = {True: "yes", False: "**no**", None: "not compared"}[case.equal]
    repaired = ", when the fault was removed" if case.repaired else ""
    return f"{case.after:.0f} s{repaired}", str(case.steps_lost), str(case.prompts_again), equal
