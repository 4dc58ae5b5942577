"""Compile the recipes of a ROCm cell, inspect the wheels, execute kernels of them, and record all of it."""

from collections.abc import Iterator, Sequence, Set
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from scripts.digests import sha256_file
from scripts.errors import UserError
from scripts.hip import cases, execution, inspection, recipes
from scripts.hip.execution import CHECKOUT, NOT_SET, Outcome
from scripts.hip.inspection import Package
from scripts.images import rootfs
from scripts.locking import exclusive_lock
from scripts.matrix.load import Cell, Matrix
from scripts.matrix.model import targets
from scripts.testing import credit, records
from scripts.testing.records import FAILED, PASSED, SKIPPED, Subject, Tally

SUITE = "hip"
NO_EMULATOR = f"{CHECKOUT} is not set"
# gfx90a addresses spilled registers through a swizzled buffer; the emulator has linear ones.
NO_SCRATCH = "the emulator lacks the scratch memory of gfx90a, which this kernel uses"


class Executed(msgspec.Struct, frozen=True):
    """A kernel with one element type on one architecture: its worst error if it was executed."""

    kernel: str
    type: str
    head_size: int | None
    architecture: str
    seconds: float
    error: float | None
    tolerance: float
    reason: str = ""

    @property
    def outcome(self) -> int:
        """The outcome as a test."""
        if self.error is None:
            return SKIPPED if self.reason == NO_SCRATCH else FAILED
        return PASSED if self.error <= self.tolerance else FAILED


class Compiled(msgspec.Struct, frozen=True):
    """What one toolchain gave; ``sources`` are those of `sources.outcomes`."""

    compiler: str
    packages: dict[str, Package]
    executed: tuple[Executed, ...] = ()
    sources: dict[str, tuple[int, str]] = {}

    @property
    def is_complete(self) -> bool:
        """Whether no listed source is left."""
        return all(outcome == PASSED for outcome, _ in self.sources.values())


class Report(msgspec.Struct, frozen=True):
    """The outcome for a cell, by toolchain; ``emulator`` is the sha256 of its source."""

    toolchains: dict[str, Compiled]
    emulator: str = ""

    @property
    def gpus(self) -> list[str]:
        """The architectures whose kernels were executed."""
        return sorted({item.architecture for one in self.toolchains.values() for item in one.executed})


def prove(
    matrix: Matrix, cell: Cell, again: bool, minutes: float | None = None
) -> tuple[int, records.Record | None]:
    """Run the suite and return 1 when something is wrong, with the record.

    What passed before with the same inputs is not repeated, unless it lacked the emulator that the user now
    names. A compilation is ended after ``minutes``.
    """
    emulator = execution.checkout() if execution.is_named() else None
    tested = subject(matrix, cell)
    if not again and (before := _passed_before(tested, emulator)):
        return 0, before
    with credit.recording(tested, SUITE) as tally:
        toolchains = recipes.proof_of(matrix, cell).toolchains
        found = {name: _compiled(matrix, cell, name, emulator, minutes) for name in toolchains}
        report = Report(found, sha256_file(emulator / execution.EMULATOR) if emulator else "")
        tally.attach(msgspec.json.format(msgspec.json.encode(report), indent=1), ".json")
        for name, one in found.items():
            _count(tally, name, one, recipes.packages(cell))
    show(report)
    return min(1, tally.code or len(tally.failures)), tally.record


def subject(matrix: Matrix, cell: Cell) -> Subject:
    """Return what the suite runs on, named by the inputs digest too: a toolchain has no id as an image."""
    inputs = recipes.digest(matrix, cell)
    toolchains = ",".join(recipes.proof_of(matrix, cell).toolchains)
    return Subject(cell.id, f"{inputs[: records.DIGITS]} by {toolchains}", inputs)


def _passed_before(tested: Subject, emulator: Path | None) -> records.Record | None:
    """Return the record for which the suite need not run, or None."""
    before = credit.passed_before(tested, SUITE)
    if before and emulator and NO_EMULATOR in before.skips:
        print(f"{SUITE}: repeated: no kernel was executed in that run, because {NO_EMULATOR}", flush=True)
        return None
    return before


def _compiled(
    matrix: Matrix, cell: Cell, toolchain: str, emulator: Path | None, minutes: float | None
) -> Compiled:
    proof, gpus = recipes.proof_of(matrix, cell), targets(cell.accelerator)
    builder = rootfs.image(recipes.toolchain_root(matrix, toolchain))
    print(f"{toolchain}: compiling (minutes; only the first time)", flush=True)
    try:
        wheels, sources = recipes.compiled(matrix, cell, toolchain, minutes)
    except recipes.IncompleteError as error:
        print(f"{toolchain}: {error}", flush=True)
        return Compiled(inspection.compiler(builder), {}, sources=error.sources)
    providers = inspection.providers(builder, recipes.torch_released(cell, proof))
    built = {recipes.built(cell, name): wheel for name, wheel in wheels.items()}
    packages = {one[0]: inspection.inspect(one, wheel, gpus, providers) for one, wheel in built.items()}
    executed: tuple[Executed, ...] = ()
    if emulator:
        folder = recipes.FOLDER / "executed" / toolchain
        with exclusive_lock(folder, "an execution of the same kernels"):
            executor = execution.Executor(builder, folder, emulator, built)
            chosen = [case for case in cases.cases() if case.package in built]
            executed = tuple(item for gpu in gpus for item in _executed(executor, gpu, chosen))
    return Compiled(inspection.compiler(builder), packages, executed, sources)


def _executed(executor: execution.Executor, gpu: str, chosen: Sequence[cases.Case]) -> Iterator[Executed]:
    unable = [case for case in chosen if gpu == "gfx90a" and executor.scratch(gpu, case)]
    for case in unable:
        yield _item(case, gpu, Outcome(0, None, NO_SCRATCH))
    for case, outcome in executor.run(gpu, [case for case in chosen if case not in unable]):
        print(f"{gpu} {case.id}: {outcome.reason or f'{outcome.error:.1e}'}", flush=True)
        yield _item(case, gpu, outcome)


def _item(case: cases.Case, gpu: str, outcome: Outcome) -> Executed:
    return Executed(
        kernel=case.kernel,
        type=case.type.name,
        head_size=case.head_size,
        architecture=gpu,
        seconds=outcome.seconds,
        error=outcome.error,
        tolerance=case.type.tolerance,
        reason=outcome.reason,
    )


def _count(tally: Tally, toolchain: str, found: Compiled, expected: Set[str]) -> None:
    """Count what is asserted of a toolchain's sources and wheels as tests."""
    for source, (outcome, reason) in found.sources.items():
        tally.count(f"{toolchain} {source}", outcome, reason)
    if not found.is_complete:
        tally.count(f"{toolchain} all sources", FAILED)
        return
    if missing := expected - found.packages.keys():
        raise UserError(f"{toolchain}: the recipes gave no wheel of {', '.join(sorted(missing))}")
    for name, package in found.packages.items():
        for problem in package.problems:
            print(f"{toolchain} {name}: {problem}", flush=True)
        tally.count(f"{toolchain} {name}", FAILED if package.problems else PASSED)
    for item in found.executed:
        size = f" head size {item.head_size}" if item.head_size else ""
        test = f"{toolchain} {item.architecture} {item.kernel}{size} {item.type}"
        tally.count(test, item.outcome, item.reason)
    if not found.executed:
        print(f"{toolchain}: no kernel was executed: {NOT_SET}", flush=True)
        tally.count(f"{toolchain} executed", SKIPPED, NO_EMULATOR)


def show(report: Report) -> None:
    """Print what was compiled and how many kernels gave the right results."""
    table = Table("toolchain", "package", "kernels", "LDS", "with spills")
    for toolchain, found in report.toolchains.items():
        for name, one in found.packages.items():
            kernels = ", ".join(f"{gpu} {count}" for gpu, count in one.kernels.items())
            table.add_row(toolchain, name, kernels, str(one.lds), str(len(one.spilled)))
    Console(highlight=False).print(table)
    for toolchain, found in report.toolchains.items():
        equal = sum(item.outcome == PASSED for item in found.executed)
        ran = sum(item.error is not None for item in found.executed)
        print(f"{toolchain}: {ran} cases executed, {equal} with the right values")
    for toolchain, found in report.toolchains.items():
        if not found.is_complete:
            compiled = sum(outcome == PASSED for outcome, _ in found.sources.values())
            print(f"{toolchain}: {compiled} of {len(found.sources)} sources compiled")


def report_of(record: records.Record, root: Path) -> Report:
    """Return the report that a record counts; `UserError` if it was altered."""
    folder = records.folder_of(record.cell, record.inputs, root) / "evidence"
    if altered := records.altered_evidence(record, root):
        raise UserError(f"{folder}: {altered}: restore it")
    return msgspec.json.decode((folder / record.evidence[0]).read_bytes(), type=Report)
