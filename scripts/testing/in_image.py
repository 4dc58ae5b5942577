"""Run plain pytest files inside the image of a cell.

``python -m scripts.testing.in_image SUITE [CELL] [--tag IMAGE [--derived]]``, then arguments for pytest. The tests
know nothing of Docker: this mounts them, read-only, beside a pytest of the host's lock. The suite ``image``
runs twice: as the image's own user, and as a user that nobody knows, on a read-only root without a network.
What a whole suite said is kept (`scripts.testing.records`), but not of an image made FROM ours.
"""

import argparse
import contextlib
import subprocess
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import docker.errors
from rich.console import Console
from uv import find_uv_bin

from scripts.docker.client import connect, with_docker_errors
from scripts.errors import UserError, run
from scripts.locking import turn
from scripts.locks import lockfile
from scripts.matrix.load import Cell, find, load
from scripts.patches.pristine import fetch_pristine, locked_hashes
from scripts.patches.series import series_of
from scripts.paths import ROOT
from scripts.testing import proofs, records
from scripts.testing.cluster import LABEL, owner, removed_at_the_end, sweep

TOOLS = ROOT / "build" / "testing"
PRISTINE = ROOT / "build" / "pristine"
PYTEST = ("pytest", "pytest-timeout", "iniconfig", "packaging", "pluggy", "pygments")
DERIVED = "RLHF_STACK_DERIVED"  # read by tests/image/test_lock.py
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Setting:
    """How the container of a test run is started."""

    title: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A suite on an image (by its id, so that a build meanwhile changes nothing; ``title`` is for people).

    ``arguments`` are for pytest.
    """

    suite: str
    image: str
    title: str
    derived: bool = False
    arguments: tuple[str, ...] = ()


OWN = Setting("as the image's own user")
STRICT = Setting(
    "as an unknown user, on a read-only root, without a network",
    {
        "user": "12345:12345",
        "read_only": True,
        "network_mode": "none",
        "tmpfs": {"/tmp": "rw,exec,mode=1777"},  # noqa: S108
    },
)


@dataclass(frozen=True)
class Suite:
    """The tests of a folder, or those of them that pytest's ``-m`` chooses, in each of some settings."""

    folder: str
    settings: tuple[Setting, ...] = (OWN,)
    chosen: str = ""


SUITES = {
    "image": Suite("image", (OWN, STRICT)),
    "cluster": Suite("cluster", chosen="not integration"),
    "integration": Suite("cluster", chosen="integration"),
    "patches": Suite("patches"),
}


def test_tools(cell: Cell) -> Path:
    """A folder with pytest for the image's Python, from the host's lock."""
    wanted = [
        entry for entry in lockfile.parse(lockfile.HOST.read_text(encoding="utf-8")) if entry.name in PYTEST
    ]
    requirements = "".join(entry.block for entry in wanted)
    stamp = TOOLS / "requirements.txt"
    with turn(TOOLS, "the installation of pytest"):
        if not stamp.exists() or stamp.read_text(encoding="utf-8") != requirements:
            asked = TOOLS / "asked.txt"
            asked.write_text(requirements, encoding="utf-8")
            _install(asked, cell.python)
            asked.rename(stamp)
    return TOOLS


def _install(requirements: Path, python: str) -> None:
    """Install what the file names for that version of Python, beside the file."""
    command = [find_uv_bin(), "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    wheels_of = ["--target", str(requirements.parent), "--python-version", python, "--only-binary=:all:"]
    done = subprocess.run(
        [*command, *wheels_of, "-r", str(requirements)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise UserError(f"pytest for the image cannot be installed: {' '.join(done.stderr.split())[:300]}")


def pristine(cell: Cell) -> Path:
    """A folder with the packages that the cell patches, unpacked as upstream released them."""
    folder = PRISTINE / cell.id
    text = lockfile.path(cell).read_text(encoding="utf-8")
    for series in series_of(cell):
        hashes = locked_hashes(series.package, series.version, text)
        wheel = fetch_pristine(series.package, series.version, hashes)
        stamp = folder / f"{wheel.name}.unpacked"
        if stamp.exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            for entry in archive.infolist():
                parts = Path(entry.filename).parts
                inside = Path(*parts[2:]) if parts[0].endswith(".data") and len(parts) > 2 else Path(*parts)
                if not entry.is_dir():
                    (folder / inside).parent.mkdir(parents=True, exist_ok=True)
                    (folder / inside).write_bytes(archive.read(entry))
                    (folder / inside).chmod((entry.external_attr >> 16) & 0o777 or 0o644)  # Ray starts some
        stamp.touch()
    return folder


def built(client: docker.DockerClient, cell: Cell, tag: str | None = None) -> str:
    """The id of a cell's image, or of the one called ``tag``; a `UserError` where there is none."""
    try:
        return str(client.images.get(tag or cell.tag).id)
    except docker.errors.ImageNotFound:
        pass
    if tag:
        raise UserError(f"there is no image {tag} here: build or pull it first")
    raise UserError(f"{cell.tag} is not built: bash scripts/nox.sh -s \"build(cell='{cell.id}')\"")


def run_suite(
    client: docker.DockerClient, cell: Cell, run: Run, setting: Setting, tally: records.Tally
) -> None:
    """Run a suite in a container, its output to this terminal, and count it in ``tally``."""
    print(f"{run.suite} tests in {run.title}, {setting.title}", flush=True)
    with tempfile.TemporaryDirectory(dir=test_tools(cell).parent, prefix="results-") as results:
        Path(results).chmod(0o1777)  # the user of the container is another
        code = _run_in_container(client, cell, run, setting, Path(results))
        tally.add(Path(results, "junit.xml"), code)


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
    if run.suite == "patches":
        volumes[str(pristine(cell))] = {"bind": "/opt/pristine", "mode": "ro"}
        environment["RLHF_STACK_PRISTINE"] = "/opt/pristine"
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
        "--override-ini=junit_family=xunit1",  # the newer one has no room for what `proves` notes
        "-ra",
        "--durations=5",
    ]
    container = client.containers.create(
        run.image,
        [*command, f"/opt/tests/{suite.folder}", "-m", suite.chosen, *run.arguments],
        environment=environment,
        volumes=volumes,
        labels={LABEL: owner()},
        shm_size=1024 * MEGABYTE,
        working_dir="/tmp",  # noqa: S108
        **setting.options,
    )
    with removed_at_the_end([container]):
        container.start()
        for chunk in container.logs(stream=True, follow=True):
            print(chunk.decode(errors="replace"), end="", flush=True)
        return int(container.wait()["StatusCode"])


def run_all(client: docker.DockerClient, cell: Cell, run: Run) -> int:
    """Run a suite in each of its settings and keep what the whole of it said; 1 when a test failed."""
    tally: contextlib.AbstractContextManager[records.Tally] = records.kept(cell.id, run.image, run.suite)
    if run.arguments or run.derived:
        tally = contextlib.nullcontext(records.Tally())
    with tally as counted:
        for setting in SUITES[run.suite].settings:
            run_suite(client, cell, run, setting, counted)
        if run.suite == "patches" and not run.arguments:
            proved = proofs.report(cell, series_of(cell), counted.proofs, Console())
            counted.code = counted.code or proved
    return 1 if counted.code else 0


def main() -> int:
    """The command line; exit code 1 when a test failed."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.testing.in_image", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("cell", nargs="?", help="a cell id; the default cell if none is given")
    parser.add_argument("--tag", metavar="IMAGE", help="another image of the cell: pulled, or made FROM it")
    parser.add_argument(
        "--derived", action="store_true", help="it is made FROM ours and may have more packages"
    )
    options, arguments = parser.parse_known_args()
    matrix = load()
    cell = find(matrix, options.cell or matrix.default)
    client = connect()
    image = built(client, cell, options.tag)
    sweep(client)
    run = Run(options.suite, image, options.tag or cell.tag, options.derived, tuple(arguments))
    return run_all(client, cell, run)


if __name__ == "__main__":
    run(with_docker_errors(main))
