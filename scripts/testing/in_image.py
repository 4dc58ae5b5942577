"""Run the pytest suites that test an image from inside, in containers of it.

The tests do not depend on Docker: this mounts them, read-only, and a pytest of the host's lock. The result of
a whole suite is recorded (`testing.records`), except for an image made FROM one of ours.
"""

import contextlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import docker.errors
from rich.console import Console
from uv import find_uv_bin

from scripts.errors import UserError
from scripts.locking import exclusive_lock
from scripts.locks import lockfile
from scripts.matrix.load import Cell
from scripts.matrix.suites import SUITES
from scripts.patches.leave_out import write_without_each
from scripts.patches.series import series_of
from scripts.paths import ROOT
from scripts.processes import captured
from scripts.testing import credit, halves, image_patches, kept, proofs, records
from scripts.testing.cluster import LABEL, MEBIBYTE, killed_after, owner_label, remove_on_exit

TOOLS = ROOT / "build" / "testing" / "tools"
PYTEST = ("pytest", "pytest-timeout", "iniconfig", "packaging", "pluggy", "pygments")
PROOFS = "proofs"  # the folder of `write_without_each`, for the suites in which patched packages have marks
KNOWN = "known"  # below it, with the halves of probes that need not run (`testing.halves`)
MARKED = ("patches", "integration")
DERIVED = "RLHF_STACK_DERIVED"  # read by tests/image/test_lock.py


@dataclass(frozen=True)
class Setting:
    """How the container of a test run is started: ``options`` of Docker's SDK."""

    title: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A suite on an image, named by its id so that a build meanwhile changes nothing.

    ``title`` is the image's name for people, ``arguments`` are for pytest. With ``again`` it runs also after
    a pass.
    """

    suite: str
    image: str
    title: str
    derived: bool = False
    arguments: tuple[str, ...] = ()
    again: bool = False


OWN_USER = Setting("as the image's own user")
STRICT = Setting(
    "as an unknown user, on a read-only root, without a network",
    {
        "user": "12345:12345",
        "read_only": True,
        "network_mode": "none",
        "tmpfs": {"/tmp": "rw,exec,mode=1777"},  # noqa: S108
    },
)


def test_tools(cell: Cell) -> Path:
    """The folder with pytest for the image's Python, from the host's lock."""
    wanted = [
        entry for entry in lockfile.parse(lockfile.HOST.read_text(encoding="utf-8")) if entry.name in PYTEST
    ]
    requirements = "".join(entry.block for entry in wanted)
    stamp = TOOLS / "requirements.txt"
    # The folder above: uv takes the lock of its target folder itself.
    with exclusive_lock(TOOLS.parent, "the installation of pytest"):
        TOOLS.mkdir(exist_ok=True)
        if not stamp.exists() or stamp.read_text(encoding="utf-8") != requirements:
            unfinished = TOOLS / "unfinished.txt"
            unfinished.write_text(requirements, encoding="utf-8")
            _install(unfinished, cell.python)
            unfinished.rename(stamp)
    return TOOLS


def _install(requirements: Path, python: str) -> None:
    """Install the requirements, for that version of Python, into the folder of their file."""
    command = [find_uv_bin(), "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    options = ["--target", str(requirements.parent), "--python-version", python, "--only-binary=:all:"]
    done = captured([*command, *options, "-r", str(requirements)])
    if done.returncode:
        raise UserError(f"pytest cannot be installed for the image: {' '.join(done.stderr.split())[:300]}")


def local_image(client: docker.DockerClient, cell: Cell, tag: str | None = None) -> str:
    """The id of a cell's local image, or of the one with ``tag``; a `UserError` without it."""
    try:
        return str(client.images.get(tag or cell.tag).id)
    except docker.errors.ImageNotFound:
        pass
    if tag:
        raise UserError(f"no local image {tag}: build or pull it first")
    raise UserError(f"{cell.tag} is not built: run bash scripts/nox.sh -s build -- {cell.id}")


def run_suite(
    client: docker.DockerClient, cell: Cell, run: Run, setting: Setting, tally: records.Tally
) -> None:
    """Run a suite in a container, print its output, and add its counts to ``tally``."""
    print(f"{run.suite} tests in {run.title}, {setting.title}", flush=True)
    with tempfile.TemporaryDirectory(dir=test_tools(cell).parent, prefix="results-") as results:
        Path(results).chmod(0o1777)  # the container has another user
        marks = {}
        executed = Path(results, PROOFS, "executed")
        if run.suite in MARKED:
            marks = write_without_each(cell, executed.parent)
            executed.touch()
            executed.chmod(0o666)
            halves.lend(cell, executed.with_name(KNOWN), run.again)
        code = _run_in_container(client, cell, run, setting, Path(results))
        if code:
            print(f"{run.suite}: pytest ended with exit code {code}", flush=True)
        tally.add(Path(results, "junit.xml"), code)
        if marks:
            tally.add_marks(marks, executed)
            ran = sum(found.changes - len(found.missed) for found in tally.executed.values())
            total = sum(found.changes for found in tally.executed.values())
            print(f"{run.suite}: {ran} of {total} changes of the cell's patches were executed", flush=True)
            halves.keep(cell, executed.with_name(KNOWN))


def _run_in_container(
    client: docker.DockerClient, cell: Cell, run: Run, setting: Setting, results: Path
) -> int:
    suite = SUITES[run.suite]
    volumes = {
        str(ROOT / "tests"): {"bind": "/opt/tests", "mode": "ro"},
        str(test_tools(cell)): {"bind": "/opt/testing", "mode": "ro"},
        str(results): {"bind": "/opt/results", "mode": "rw"},
    }
    environment = {"PYTHONPATH": "/opt/testing", "PYTHONDONTWRITEBYTECODE": "1"}
    if run.derived:
        environment[DERIVED] = "1"
    if run.suite in MARKED:
        environment["RLHF_STACK_PROOFS"] = f"/opt/results/{PROOFS}"  # read by tests/conftest.py
    command = [
        "python",
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "--rootdir=/opt/tests",
        "--junitxml=/opt/results/junit.xml",
        "--override-ini=junit_family=xunit1",  # xunit2 has no properties of a test case, which `proves` needs
        "-ra",
        "--durations=5",
    ]
    container = client.containers.create(
        run.image,
        [*command, f"/opt/tests/{suite.folder}", "-m", suite.marks, *run.arguments],
        environment=environment,
        volumes=volumes,
        labels={LABEL: owner_label()},
        shm_size=1024 * MEBIBYTE,
        working_dir="/tmp",  # noqa: S108
        **setting.options,
    )
    with remove_on_exit([container]), killed_after(suite.hours, container, run.suite):
        container.start()
        for chunk in container.logs(stream=True, follow=True):
            print(chunk.decode(errors="replace"), end="", flush=True)
        return int(container.wait()["StatusCode"])


def run_all(client: docker.DockerClient, cell: Cell, run: Run) -> int:
    """Run a suite in each of its settings and record the result; 1 when a test failed.

    A suite that passed before on this image (`testing.credit`) is not repeated. One whose tests run patched
    files of the checkout (`MARKED`) is refused on an image with other ones, and leaves no record.
    """
    tally: contextlib.AbstractContextManager[records.Tally] = contextlib.nullcontext(records.Tally())
    if not run.arguments and not run.derived:
        tested = records.subject(cell, client.images.get(run.image))
        if not run.again and credit.passed_before(tested, run.suite):
            return 0
        tally = credit.recording(tested, run.suite)
    if run.suite in MARKED:
        image_patches.require_same(client, cell, run.image)
    with tally as counted:
        for setting in (OWN_USER, STRICT) if SUITES[run.suite].strict else (OWN_USER,):
            run_suite(client, cell, run, setting, counted)
        if run.suite == "patches" and not run.arguments:
            counted.code = counted.code or proofs.report(cell, series_of(cell), counted, Console())
    kept.keep(client, cell, counted.record)
    return 1 if counted.code else 0
