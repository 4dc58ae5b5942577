"""The tables of docs/amd.md that follow from the committed record of the suite."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.git import DIRTY
from scripts.hip import recipes
from scripts.hip.prove import SUITE, Executed, Report, report_of
from scripts.matrix.load import Cell, Matrix, expand
from scripts.matrix.model import named
from scripts.paths import ROOT
from scripts.release.render import replace_between, table
from scripts.testing import records
from scripts.testing.records import COMMITTED, DIGITS, PASSED, RECORDS, SKIPPED, Record
from scripts.testing.suite_digest import suite_digest

PAGE = ROOT / "docs" / "amd.md"
BEGIN = "<!-- hip: begin, written by python -m scripts hip -->"
END = "<!-- hip: end -->"
NOTHING = "There is no record: `bash scripts/nox.sh -s hip` writes one.\n"
SENTENCE = "Nothing of this was run on an AMD GPU{}.\n"
NO_KERNEL = ", and no kernel of it on the emulator"


def text(matrix: Matrix, page: str, root: Path = COMMITTED) -> str:
    """Return the page with its tables as the records in ``root`` have them; `UserError` without markers."""
    cells = [cell for cell in expand(matrix) if named(matrix.variants, cell.variant).compile_proof]
    runs = [(cell, record) for cell in cells for record in records.history(cell.id, (root,))]
    of_suite = [(cell, record) for cell, record in runs if record.suite == SUITE]
    latest = {cell.variant: (cell, record) for cell, record in sorted(of_suite, key=lambda run: run[1].when)}
    tests = suite_digest(SUITE) if latest else ""
    parts = (line for run in latest.values() for line in _tables(matrix, *run, tests, root))
    tables = "\n".join(parts) or NOTHING
    return replace_between(page, BEGIN, END, tables, "docs/amd.md")


def keep(record: Record, local: Path = RECORDS, root: Path = COMMITTED) -> None:
    """Add the attempts up to a record, and the reports that they count, to the committed ones."""
    source, target = (records.folder_of(record.cell, record.inputs, one) for one in (local, root))
    (target / "evidence").mkdir(parents=True, exist_ok=True)
    for attempt in records.read(record.cell, record.inputs, (local, root)):
        for name in (records.file_name(attempt), *(f"evidence/{name}" for name in attempt.evidence)):
            if (source / name).exists():
                shutil.copyfile(source / name, target / name)


def _tables(matrix: Matrix, cell: Cell, record: Record, tests: str, root: Path) -> Iterator[str]:
    """Yield what the page has about a record; ``tests`` is the digest of the tests in this checkout."""
    report = report_of(record, root)
    counts = f"{record.passed} passed, {len(record.failures)} failed, {record.skipped} skipped"
    yield (
        f"{cell.id}, {record.when:%Y-%m-%d}, commit {record.revision[:DIGITS]}, "
        f"inputs {record.inputs[:DIGITS]}:\n{record.outcome}, {counts}.\n"
    )
    changed = {
        "what is compiled": recipes.digest(matrix, cell) != record.inputs,
        "the code of the proof": tests != record.tests,
    }
    if any(changed.values()):
        names = " and ".join(name for name, different in changed.items() if different)
        yield f"**Not verified yet**: {names} changed since.\n"
    yield table(("attempt", "outcome", "date", "commit", "failed"), _attempts(record, root))
    yield table(("toolchain", "compiler"), [(name, one.compiler) for name, one in report.toolchains.items()])
    yield from _what_ran(report)
    if refused := _sources(report):
        yield table(("source", "toolchain", "outcome"), refused)
    header = ("compiled", "toolchain", "GPU", "device objects", "kernels", "most static LDS", "with spills")
    if compiled := list(_compiled(report)):
        yield table(header, compiled)
    if gpus := report.gpus:
        yield table(("executed on the emulator", "type", "toolchain", *gpus), _executed(report, gpus))


def _what_ran(report: Report) -> Iterator[str]:
    """Yield where no kernel was run, and how many sources each toolchain compiled if these are all."""
    yield SENTENCE.format("" if report.gpus else NO_KERNEL)
    for name, one in report.toolchains.items():
        if one.sources and one.is_complete:
            yield f"{name} compiled all {len(one.sources)} sources that vLLM's CMake files list.\n"


def _attempts(record: Record, root: Path) -> Iterator[tuple[str, ...]]:
    """Yield a row for each attempt on the inputs of a record."""
    for one in records.read(record.cell, record.inputs, (root,)):
        if one.suite == SUITE:
            dirty = ", with uncommitted changes" if one.revision.endswith(DIRTY) else ""
            commit = f"{one.revision.removesuffix(DIRTY)[:DIGITS]}{dirty}"
            yield str(one.attempt), one.outcome, f"{one.when:%Y-%m-%d}", commit, ", ".join(one.failures)


def _sources(report: Report) -> list[tuple[str, str, str]]:
    """Return a row for each source of a recipe that not all sources of which were compiled."""
    return [
        (f"`{source}`", toolchain, "compiled" if outcome == PASSED else reason)
        for toolchain, found in report.toolchains.items()
        if not found.is_complete
        for source, (outcome, reason) in sorted(found.sources.items())
    ]


def _compiled(report: Report) -> Iterator[tuple[str, ...]]:
    for toolchain, found in report.toolchains.items():
        for name, one in found.packages.items():
            for gpu, count in one.kernels.items():
                spilled = [kernel for kernel in one.spilled if kernel.architecture == gpu]
                most = max((kernel.vgpr_spills for kernel in spilled), default=0)
                spills = f"{len(spilled)}, at most {most} vector registers" if spilled else "0"
                yield name, toolchain, gpu, str(one.objects[gpu]), str(count), f"{one.lds} bytes", spills


def _executed(report: Report, gpus: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for toolchain, found in report.toolchains.items():
        rows: dict[tuple[str, str], list[Executed]] = {}
        for item in found.executed:
            rows.setdefault((item.kernel, item.type), []).append(item)
        for (kernel, kind), items in sorted(rows.items()):
            of_gpus = (_cell([item for item in items if item.architecture == gpu]) for gpu in gpus)
            yield kernel, kind, toolchain, *of_gpus


def _cell(items: Sequence[Executed]) -> str:
    """Return the outcome of one kernel and type on one GPU, over all head sizes."""
    parts = []
    sizes = {outcome: [item for item in items if item.outcome == outcome] for outcome in (0, 1, 2)}
    if equal := sizes.pop(PASSED):
        heads = f"head sizes {_list(equal)}: " if equal[0].head_size else ""
        parts.append(f"{heads}equal, error at most {max(item.error or 0 for item in equal):.1e}")
    for outcome, others in sizes.items():
        for item in others:
            head = f"head size {item.head_size}: " if item.head_size else ""
            word = "not executed" if outcome == SKIPPED else "wrong"
            parts.append(f"{head}{word}, {item.reason or f'error {item.error:.1e}'}")
    return "; ".join(parts)


def _list(items: Sequence[Executed]) -> str:
    return ", ".join(str(size) for size in sorted(item.head_size or 0 for item in items))
