"""The project's tasks; `bash scripts/nox.sh -l` lists them. The logic is in ``scripts/``.

Run it by ``scripts/nox.sh``, which makes the environment that the sessions share. A session that takes a cell
runs for the default one; another is named as in ``-s "build(cell='CELL')"``.
"""

import re
import sys
from collections.abc import Iterable, Mapping

import nox

try:
    from scripts.errors import UserError
    from scripts.matrix.load import Cell, expand, find, load, stand_ins
    from scripts.testing.records import required
    from scripts.testing.suites import COMMANDS
except ModuleNotFoundError as missing:
    arguments = " ".join(sys.argv[1:])
    sys.exit(
        f"error: {missing.name} is not in this environment: run `bash scripts/nox.sh {arguments}` instead"
    )

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "unit"]

END_SECONDS = 60
NAMED = re.findall(r"\(cell=['\"](.*?)['\"]\)", " ".join(sys.argv[1:]))
LISTING = {"-l", "--list"} & set(sys.argv[1:])
try:
    MATRIX = load()
    CHOSEN = [find(MATRIX, name).id for name in NAMED]
except UserError as problem:
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(2)
DEFAULT = MATRIX.default
EVERY = (*expand(MATRIX), *stand_ins(MATRIX))
CELLS = [cell.id for cell in EVERY if LISTING or cell.id in {DEFAULT, *CHOSEN}]
for_cell = nox.parametrize("cell", CELLS)


def _python(session: nox.Session, *arguments: str) -> None:
    """Run a module of this environment; interrupted, it has time to remove its containers."""
    session.run(
        sys.executable, "-m", *arguments, interrupt_timeout=END_SECONDS, terminate_timeout=END_SECONDS
    )


def _with_docker(session: nox.Session, *arguments: str) -> None:
    """The same for a module that needs the engine, which is set up or started if it has to be."""
    _python(session, "scripts.docker.bootstrap", "ensure")
    _python(session, *arguments)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types, shell, Dockerfile, and that generated files are what they are made of."""
    _python(session, "scripts.lint")


@nox.session
def unit(session: nox.Session) -> None:
    """Run the tests that need no Docker."""
    _python(session, "pytest", "tests/unit", *session.posargs)


@nox.session
def lock(session: nox.Session) -> None:
    """Write the hashed locks of the cells and of the host's tools (-- --check: tell a stale one)."""
    _python(session, "scripts.locks.lockfile", *session.posargs)


@nox.session
def base(session: nox.Session) -> None:
    """Make the base root filesystems from Debian packages alone."""
    _with_docker(session, "scripts.images.rootfs", *session.posargs)


@nox.session
@for_cell
def build(session: nox.Session, cell: str) -> None:
    """Build the image of a cell."""
    _with_docker(session, "scripts.images.image_build", cell)


@nox.session
@for_cell
def image(session: nox.Session, cell: str) -> None:
    """Check, inside the image and from outside, what is stated about it."""
    _suite(session, "image", cell)


@nox.session
@for_cell
def cluster(session: nox.Session, cell: str) -> None:
    """Run the tests on several Ray nodes inside one container."""
    _suite(session, "cluster", cell)


@nox.session
@for_cell
def integration(session: nox.Session, cell: str) -> None:
    """Train on layouts of up to four nodes with eight GPUs and engines of up to eight, in one container."""
    _suite(session, "integration", cell)


@nox.session
@for_cell
def network(session: nox.Session, cell: str) -> None:
    """Run the tests on several containers with their own addresses."""
    _suite(session, "network", cell)


@nox.session
@for_cell
def patches(session: nox.Session, cell: str) -> None:
    """Show that each patch's test fails on the pristine package and passes on the patched one."""
    _suite(session, "patches", cell)


@nox.session
@for_cell
def knownbad(session: nox.Session, cell: str) -> None:
    """Probe the rows of the known-bad database, and report those that no longer hold."""
    session.env["PYTHONPATH"] = "images/runtime"
    _with_docker(session, "scripts.testing.known_bad", cell)


@nox.session
@for_cell
def registry(session: nox.Session, cell: str) -> None:
    """Push to a registry on this machine, pull from it, build FROM the image; test what comes out."""
    _with_docker(session, "scripts.testing.on_host", "registry", cell, *session.posargs)


@nox.session
@for_cell
def faults(session: nox.Session, cell: str) -> None:
    """Hit a training run with each fault in each phase, and write the catalogue's table (-- -k PART)."""
    try:
        _with_docker(session, "scripts.testing.on_host", "faults", cell, *session.posargs)
    finally:
        _python(session, "scripts.release.fault_cases")


@nox.session
def catalogue(session: nox.Session) -> None:
    """Measure the images that are here, and write images/README.md and the README's table (-- --check)."""
    _with_docker(session, "scripts.release.catalogue", *session.posargs)


@nox.session
def publish(session: nox.Session) -> None:
    """Push the tested images to a registry (-- REGISTRY/REPO [--cell CELL])."""
    _with_docker(session, "scripts.release.publish", *session.posargs)


@nox.session
@for_cell
def demo(session: nox.Session, cell: str) -> None:
    """Train with the real stack on two nodes, from nothing; the report is build/demo/CELL/report.json."""
    _suite(session, "demo", cell)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests of the default cell; the suites of its image two at a time."""
    lint(session)
    unit(session)
    build(session, cell=DEFAULT)
    longest_first = ("patches", "network", "cluster", "image")
    _side_by_side(session, [f"{suite}:{DEFAULT}" for suite in longest_first])


@nox.session
def others(session: nox.Session) -> None:
    """Build other cells and run on each the suites that matrix.yaml names for every submission."""
    _suites(session, {cell: cell.per_submission for cell in EVERY if cell.per_submission})


@nox.session(tags=["full"])
def full(session: nox.Session) -> None:
    """Build every cell (for ROCm the stand-in) and run every suite that applies, as before a release."""
    lint(session)
    unit(session)
    _suites(session, {cell: required(cell) for cell in EVERY if not cell.sources})
    registry(session, cell=DEFAULT)


def _suite(session: nox.Session, suite: str, cell: str) -> None:
    """Run one suite on the image of a cell, with the session's own arguments."""
    for command in COMMANDS[suite]:
        _with_docker(session, *command, cell, *session.posargs)


def _suites(session: nox.Session, wanted: Mapping[Cell, Iterable[str]]) -> None:
    """Build cells, then run suites on each, two at a time; layers are a part of the suite image."""
    for cell in wanted:
        build(session, cell=cell.id)
    jobs = [f"{suite}:{cell.id}" for cell, suites in wanted.items() for suite in suites if suite in COMMANDS]
    _side_by_side(session, jobs)


def _side_by_side(session: nox.Session, jobs: Iterable[str]) -> None:
    _with_docker(session, "scripts.testing.suites", *jobs)
