"""The project's sessions; ``bash scripts/nox.sh -l`` lists them, ``python -m scripts`` does the work.

Arguments after ``--`` belong to the command, a cell first: ``bash scripts/nox.sh -s demo -- CELL``. Without a
cell a session runs for the default one.
"""

import sys

import nox

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "unit"]

END_SECONDS = 60


def _python(session: nox.Session, *arguments: str) -> None:
    """Run a module of this environment; an interrupt leaves it time to remove its containers."""
    session.run(
        sys.executable, "-m", *arguments, interrupt_timeout=END_SECONDS, terminate_timeout=END_SECONDS
    )


def _with_docker(session: nox.Session, *arguments: str) -> None:
    """Run ``python -m scripts`` with the session's arguments; Docker is installed or started if necessary."""
    _python(session, "scripts", "docker", "ensure")
    _python(session, "scripts", *arguments, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types, layers, shell, Dockerfile, and that no generated file is stale."""
    _python(session, "scripts", "lint")


@nox.session
def unit(session: nox.Session) -> None:
    """Run the tests that need no Docker (-- PYTEST ARGUMENTS)."""
    _python(session, "pytest", *session.posargs)


@nox.session
def lock(session: nox.Session) -> None:
    """Write the hashed locks of the cells and of the host's tools (-- --check: report stale ones)."""
    _python(session, "scripts", "lock", *session.posargs)


@nox.session
def roots(session: nox.Session) -> None:
    """Build the base root filesystems from Debian packages."""
    _with_docker(session, "roots")


@nox.session
def build(session: nox.Session) -> None:
    """Build the image of a cell (-- CELL)."""
    _with_docker(session, "build")


@nox.session
def image(session: nox.Session) -> None:
    """Test an image from inside (-- CELL PYTEST ARGUMENTS), then its layers from outside."""
    _with_docker(session, "test", "image")
    _python(session, "scripts", "test", "layers", *session.posargs[:1])


@nox.session
def cluster(session: nox.Session) -> None:
    """Run the tests on several Ray nodes inside one container (-- CELL PYTEST ARGUMENTS)."""
    _with_docker(session, "test", "cluster")


@nox.session
def integration(session: nox.Session) -> None:
    """Train on layouts of up to four nodes with eight GPUs, in one container (-- CELL PYTEST ARGUMENTS)."""
    _with_docker(session, "test", "integration")


@nox.session
def network(session: nox.Session) -> None:
    """Run the tests on several containers with their own addresses (-- CELL PYTEST ARGUMENTS)."""
    _with_docker(session, "test", "network")


@nox.session
def operation(session: nox.Session) -> None:
    """Let runs on several containers lose nodes and be preempted, and certify (-- CELL PYTEST ARGUMENTS)."""
    _with_docker(session, "test", "operation")


@nox.session
def patches(session: nox.Session) -> None:
    """Check that each patch's test fails without the patch and passes with it (-- CELL PYTEST ARGUMENTS)."""
    _with_docker(session, "test", "patches")


@nox.session
def known_bad(session: nox.Session) -> None:
    """Report rows of the known-bad database that no longer apply (-- CELL)."""
    _with_docker(session, "known-bad")


@nox.session
def hip(session: nox.Session) -> None:
    """Compile the ROCm recipes with Debian's HIP and execute kernels on an emulator (-- CELL)."""
    _with_docker(session, "hip")


@nox.session
def registry(session: nox.Session) -> None:
    """Push to a local registry, pull from it and build FROM the image (-- CELL PYTEST ARGUMENTS)."""
    _with_docker(session, "test", "registry")


@nox.session
def faults(session: nox.Session) -> None:
    """Inject each fault into each phase of a run, and write their table (-- CELL PYTEST ARGUMENTS)."""
    try:
        _with_docker(session, "test", "faults")
    finally:
        _python(session, "scripts", "fault-table")


@nox.session
def catalogue(session: nox.Session) -> None:
    """Measure the local images, and write images/README.md and the README's table (-- --check)."""
    _with_docker(session, "catalogue")


@nox.session
def publish(session: nox.Session) -> None:
    """Push the tested images to a registry (-- REGISTRY/REPO [--cell CELL])."""
    _with_docker(session, "publish")


@nox.session
def demo(session: nox.Session) -> None:
    """Build a cell and train with it on two nodes; writes build/demo/CELL/report.json (-- CELL)."""
    _with_docker(session, "demo")


@nox.session
def tests(session: nox.Session) -> None:
    """Run lint, the unit tests, the build and the suites of the default cell, two suites at a time."""
    _with_docker(session, "suites", "--default")


@nox.session
def ci_extra(session: nox.Session) -> None:
    """Build other cells and run on each the suites that matrix.yaml names in ci_suites."""
    _with_docker(session, "suites", "--ci")


@nox.session(tags=["full"])
def full(session: nox.Session) -> None:
    """Build every cell (for ROCm the stand-in) and run every suite that a release requires."""
    _with_docker(session, "suites", "--release")
