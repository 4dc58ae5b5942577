"""Run plain pytest files inside the image of a cell.

``python -m scripts.imagetests {image,cluster,patches} [CELL]``. The tests know nothing of Docker: this mounts
them, read-only, beside a pytest of the host's lock. The suite ``image`` runs twice: as the image's own user,
and as a user that nobody knows, on a read-only root without a network.
"""

import argparse
import subprocess
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
from uv import find_uv_bin

from scripts import engine, lock, wheels
from scripts.bake import series_of
from scripts.cluster import LABEL, owner, removed_at_the_end, sweep
from scripts.matrix import ROOT, Cell, find, load
from scripts.problem import Problem, run

TOOLS = ROOT / "build" / "testing"
PRISTINE = ROOT / "build" / "pristine"
PYTEST = ("pytest", "pytest-timeout", "iniconfig", "packaging", "pluggy", "pygments")
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Setting:
    """How the container of a test run is started."""

    title: str
    options: dict[str, Any] = field(default_factory=dict)


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
SUITES = {"image": (OWN, STRICT), "cluster": (OWN,), "patches": (OWN,)}


def test_tools(cell: Cell) -> Path:
    """A folder with pytest for the image's Python, from the host's lock."""
    wanted = [entry for entry in lock.parse(lock.HOST.read_text(encoding="utf-8")) if entry.name in PYTEST]
    requirements = "".join(entry.block for entry in wanted)
    stamp = TOOLS / "requirements.txt"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != requirements:
        TOOLS.mkdir(parents=True, exist_ok=True)
        asked = TOOLS / "asked.txt"
        asked.write_text(requirements, encoding="utf-8")
        command = [
            find_uv_bin(),
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--require-hashes",
            "--target",
            str(TOOLS),
        ]
        done = subprocess.run(
            [*command, "--python-version", cell.python, "--only-binary=:all:", "-r", str(asked)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Problem(f"pytest for the image cannot be installed: {' '.join(done.stderr.split())[:300]}")
        asked.rename(stamp)
    return TOOLS


def pristine(cell: Cell) -> Path:
    """A folder with the packages that the cell patches, unpacked as upstream released them."""
    folder = PRISTINE / cell.id
    text = lock.path(cell).read_text(encoding="utf-8")
    for series in series_of(cell):
        hashes = wheels.locked_hashes(series.package, series.version, text)
        wheel = wheels.fetch_pristine(series.package, series.version, hashes)
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
        stamp.touch()
    return folder


def run_suite(
    client: docker.DockerClient, cell: Cell, suite: str, setting: Setting, arguments: Sequence[str]
) -> int:
    """Run a suite in a container of the cell, its output to this terminal; returns pytest's exit code."""
    print(f"{suite} tests in {cell.tag}, {setting.title}", flush=True)
    volumes = {
        str(ROOT / "tests"): {"bind": "/opt/tests", "mode": "ro"},
        str(test_tools(cell)): {"bind": "/opt/testing", "mode": "ro"},
    }
    environment = {"PYTHONPATH": "/opt/testing", "PYTHONDONTWRITEBYTECODE": "1"}
    if suite == "patches":
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
        "-ra",
    ]
    container = client.containers.create(
        cell.tag,
        [*command, f"/opt/tests/{suite}", *arguments],
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


def main() -> int:
    """The command line; exit code 1 when a test failed."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.imagetests", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("suite", choices=list(SUITES))
    parser.add_argument("cell", nargs="?", help="a cell id; the default cell if none is given")
    options, arguments = parser.parse_known_args()
    matrix = load()
    cell = find(matrix, options.cell or matrix.default)
    client = engine.client()
    if not client.images.list(name=cell.tag):
        raise Problem(f"{cell.tag} is not built: bash scripts/nox.sh -s \"build(cell='{cell.id}')\"")
    sweep(client)
    codes = [run_suite(client, cell, options.suite, setting, arguments) for setting in SUITES[options.suite]]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    run(engine.asked(main))
