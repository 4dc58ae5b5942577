"""The project's tasks; `bash scripts/nox.sh -l` lists them. The logic is in ``scripts/``.

Run it by ``scripts/nox.sh``, which makes the environment that the sessions share. A session that takes a cell
runs for the default one; another is named as in ``-s "build(cell='CELL')"``.
"""

import re
import sys
from collections.abc import Iterable

import nox

try:
    from scripts.matrix import Cell, expand, find, load, stand_ins
    from scripts.problem import Problem
    from scripts.records import required
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
except Problem as problem:
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
    _python(session, "scripts.engine", "ensure")
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
    _python(session, "scripts.lock", *session.posargs)


@nox.session
def base(session: nox.Session) -> None:
    """Make the base root filesystems from Debian packages alone."""
    _with_docker(session, "scripts.base", *session.posargs)


@nox.session
@for_cell
def build(session: nox.Session, cell: str) -> None:
    """Build the image of a cell."""
    _with_docker(session, "scripts.bake", cell)


@nox.session
@for_cell
def image(session: nox.Session, cell: str) -> None:
    """Check, inside the image and from outside, what is stated about it."""
    _with_docker(session, "scripts.imagetests", "image", cell)
    _python(session, "scripts.hosttests", "layers", cell)


@nox.session
@for_cell
def cluster(session: nox.Session, cell: str) -> None:
    """Run the tests on several Ray nodes inside one container."""
    _with_docker(session, "scripts.imagetests", "cluster", cell)


@nox.session
@for_cell
def network(session: nox.Session, cell: str) -> None:
    """Run the tests on several containers with their own addresses."""
    _with_docker(session, "scripts.hosttests", "network", cell, *session.posargs)


@nox.session
@for_cell
def patches(session: nox.Session, cell: str) -> None:
    """Show that each patch's test fails on the pristine package and passes on the patched one."""
    _with_docker(session, "scripts.imagetests", "patches", cell)


@nox.session
@for_cell
def knownbad(session: nox.Session, cell: str) -> None:
    """Probe the rows of the known-bad database, and report those that no longer hold."""
    session.env["PYTHONPATH"] = "images/runtime"
    _with_docker(session, "scripts.knownbad", cell)


@nox.session
@for_cell
def registry(session: nox.Session, cell: str) -> None:
    """Push to a registry on this machine, pull from it, build FROM the image; test what comes out."""
    _with_docker(session, "scripts.hosttests", "registry", cell, *session.posargs)


@nox.session
@for_cell
def faults(session: nox.Session, cell: str) -> None:
    """Hit a training run with each fault in each phase, and write the catalogue's table (-- -k PART)."""
    try:
        _with_docker(session, "scripts.hosttests", "faults", cell, *session.posargs)
    finally:
        _python(session, "scripts.faults")


@nox.session
def catalogue(session: nox.Session) -> None:
    """Measure the images that are here, and write images/README.md and the README's table (-- --check)."""
    _with_docker(session, "scripts.catalogue", *session.posargs)


@nox.session
def publish(session: nox.Session) -> None:
    """Push the tested images to a registry (-- REGISTRY/REPO [--cell CELL])."""
    _with_docker(session, "scripts.publish", *session.posargs)


@nox.session
@for_cell
def demo(session: nox.Session, cell: str) -> None:
    """Train with the real stack on two nodes, from nothing; the report is build/demo/report.json."""
    _with_docker(session, "scripts.demo", cell, *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests of the default cell, in the order in which they are cheap."""
    lint(session)
    unit(session)
    for test in (build, image, cluster, network, patches):
        test(session, cell=DEFAULT)


@nox.session
def others(session: nox.Session) -> None:
    """Build other cells and run on each the suites that matrix.yaml names for every submission."""
    for cell in EVERY:
        _suites(session, cell, cell.per_submission)


@nox.session(tags=["full"])
def full(session: nox.Session) -> None:
    """Build every cell (for ROCm the stand-in) and run every suite that applies, as before a release."""
    lint(session)
    unit(session)
    for cell in EVERY:
        if not cell.sources:
            _suites(session, cell, required(cell))
    registry(session, cell=DEFAULT)


def _suites(session: nox.Session, cell: Cell, suites: Iterable[str]) -> None:
    """Build a cell and run some suites on it, if there are any."""
    tests = {"image": image, "patches": patches, "cluster": cluster, "network": network, "demo": demo}
    for test in [build, *(tests[name] for name in tests if name in suites)] if suites else []:
        test(session, cell=cell.id)
