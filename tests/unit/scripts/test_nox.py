"""The script that makes nox's environment, on a made-up lock, and the sessions of the noxfile."""

import base64
import hashlib
import os
import pwd
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pip
import pytest
import typer.main
from nox import registry

from scripts import cli
from scripts.docker.client import SOCKET
from scripts.paths import ROOT

SESSIONS = [
    *("lint", "unit", "lock", "roots", "build", "image", "cluster", "integration", "network", "operation"),
    *("patches", "known_bad", "hip", "registry", "faults", "catalogue", "publish", "demo", "tests"),
    *("ci_extra", "full"),
]
# A python3 whose environments get the pip of this one: making pip's own takes seconds.
PYTHON = """#!/bin/sh
[ "$1 $2" = "-m venv" ] || exec {python} "$@"
{python} -m venv --without-pip "$3" && ln -s {pip} "$3"/lib/python3.*/site-packages/
"""


def wheel(folder: Path, version: str, main: str = "") -> str:
    """Make a package ``nox`` that prints its version and arguments; returns its line in a lock."""
    main = main or f"import os, sys; print('nox {version}', *sys.argv[1:], os.getcwd())"
    folder.mkdir(exist_ok=True)
    info = f"nox-{version}.dist-info"
    files = {
        "nox/__init__.py": "",
        "nox/__main__.py": f"{main}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: nox\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {name: hashlib.sha256(text.encode()).digest() for name, text in files.items()}
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},{len(files[name])}\n"
        for name, digest in digests.items()
    )
    path = folder / f"nox-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(name, text)
    return f"nox=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


BASE_PYTHON = Path(sys.base_prefix, "bin", "python3")


class Project:
    """A folder with nox.sh and a lock of one made-up package, which no index has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = folder / ".nox" / "host"
        (folder / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "nox.sh", folder / "scripts")
        self.lock(wheel(folder / "wheels", "1.0"))
        self.python = folder / "python"
        self.python.mkdir()
        python = self.python / "python3"
        python.write_text(PYTHON.format(python=BASE_PYTHON, pip=Path(pip.__file__).parent), encoding="utf-8")
        python.chmod(0o755)

    def lock(self, text: str) -> None:
        (self.folder / "scripts" / "requirements.txt").write_text(text, encoding="utf-8")

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        settings = {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.folder / "wheels"),
            "PIP_CONFIG_FILE": os.devnull,
            "PATH": f"{self.python}:{os.environ['PATH']}",
        }
        return subprocess.run(
            ["bash", str(self.folder / "scripts" / "nox.sh"), *arguments],
            cwd="/",
            env={**os.environ, **settings, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def test_the_environment_is_made_once_and_rebuilt_if_broken_or_if_the_lock_changed(project: Project) -> None:
    (project.environment / "bin").mkdir(parents=True)  # an interrupted attempt
    first = project.run("-s", "a b")
    assert (first.returncode, first.stdout) == (0, f"nox 1.0 -s a b {project.folder}\n"), first.stderr
    assert "making the host's environment" in first.stderr
    assert project.run().stderr == "", "a second run must install nothing"
    other = f"{project.environment / 'bin'}:{project.python}:{os.environ['PATH']}"
    assert project.run(PATH=other).stderr == "", "nor one that finds another Python first in PATH"

    (project.environment / "bin" / "python").unlink()
    assert "making the host's environment" in project.run().stderr, "a broken environment must be rebuilt"

    project.lock(wheel(project.folder / "wheels", "2.0"))
    changed = project.run()
    assert changed.stdout.startswith("nox 2.0"), changed.stderr
    assert project.run().stderr == ""


def test_a_failed_installation_is_reported_and_leaves_no_stamp(project: Project) -> None:
    failed = project.run(PIP_FIND_LINKS="/nowhere")
    assert failed.returncode == 2
    assert (
        "error: the host's tools could not be installed: check the network" in failed.stderr.splitlines()[-1]
    )
    assert not (project.environment / "stamp").exists()


def test_a_checkout_that_other_users_cannot_read_is_refused(project: Project) -> None:
    (project.folder / "scripts").chmod(0o700)
    failed = project.run()
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.endswith(f"umask 077: run chmod -R go+rX {project.folder}\n")
    assert not project.environment.exists()


def test_a_file_with_another_hash_is_refused(project: Project) -> None:
    project.lock("nox==1.0 --hash=sha256:" + "0" * 64 + "\n")
    failed = project.run()
    assert failed.returncode == 2
    assert "DO NOT MATCH THE HASHES" in failed.stderr


def test_without_python_and_root_the_error_names_the_command_to_run(project: Project, tmp_path: Path) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("bash", "dirname", "mkdir", "sha256sum"):
        (commands / name).symlink_to(shutil.which(name) or "")
    for name, body in {"apt-get": "exit 0", "id": "echo 1000", "python3": "exit 1", "sudo": "exit 1"}.items():
        (commands / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (commands / name).chmod(0o755)
    script = project.folder / "scripts" / "nox.sh"
    script.write_text(
        script.read_text(encoding="utf-8").replace("/usr/bin/python3", "/nowhere/python3"), encoding="utf-8"
    )
    failed = project.run(PATH=str(commands))
    assert failed.returncode == 2
    wish = "Python 3.11 or newer with venv is missing: run sudo apt-get install --yes python3 python3-venv"
    assert failed.stderr == f"error: {wish}\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_sets_up_and_the_owner_of_the_checkout_does_the_rest() -> None:
    """What is made belongs to the owner, also what an earlier run of root left; the owner may use Docker."""
    owner = pwd.getpwnam("nobody")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        folder.chmod(0o755)
        project = Project(folder)
        prints = "import os, sys; print(os.geteuid(), os.getgroups(), os.environ['HOME'], *sys.argv[1:])"
        (folder / "scripts" / "__main__.py").write_text(f"{prints}\n", encoding="utf-8")
        project.lock(wheel(folder / "wheels", "1.0", prints))
        # This Python and its pip may be in root's home.
        reachable = shutil.copytree(Path(pip.__file__).parent, folder / "pip")
        python = PYTHON.format(python="/usr/bin/python3", pip=reachable)
        (project.python / "python3").write_text(python, encoding="utf-8")
        for path in (folder, *folder.rglob("*")):
            os.chown(path, owner.pw_uid, owner.pw_gid)
        (folder / ".nox").mkdir()
        done = project.run("-s", "roots", HOME="/root")
        made = {path for path in folder.rglob("*") if path.lstat().st_uid == 0}
    assert done.returncode == 0, done.stderr
    setup, session = done.stdout.splitlines()
    assert setup.startswith("0 ")
    assert setup.endswith(" /root docker ensure --user")
    assert session.startswith(f"{owner.pw_uid} [")
    assert session.endswith(f"] {owner.pw_dir} -s roots")
    if SOCKET.exists():
        assert str(SOCKET.stat().st_gid) in re.findall(r"\d+", session.partition("]")[0])[1:]
    assert made == set()


def test_every_session_is_listed_with_one_sentence() -> None:
    command = [sys.executable, "-m", "nox", "--list"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = [line for line in output.splitlines() if line[:2] in ("- ", "* ")]
    assert [line[2:].split(" ")[0] for line in listed] == SESSIONS
    for line in listed:
        sentence = line.partition(" -> ")[2]
        assert sentence.endswith(".")
        assert sentence.count(". ") == 0


class Session:
    """A fake of nox's session that collects the commands."""

    def __init__(self, *posargs: str) -> None:
        self.posargs = posargs
        self.commands: list[list[str]] = []

    def run(self, *command: str, **_: object) -> None:
        assert command[:2] == (sys.executable, "-m")
        self.commands.append(list(command[2:]))


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(registry, "_REGISTRY", {})
    found = runpy.run_path(str(ROOT / "noxfile.py"))
    return {name: found[name] for name in SESSIONS}


def test_sessions_run_commands_that_exist(sessions: dict[str, Any]) -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    for run in sessions.values():
        session = Session()
        run(session)
        for module, *words in session.commands:
            assert module == "pytest" or words[0] in commands


def test_arguments_of_a_session_are_those_of_its_command(sessions: dict[str, Any]) -> None:
    session = Session("CELL", "-k", "this or that")
    sessions["network"](session)
    ensure, network = session.commands
    assert ensure == ["scripts", "docker", "ensure"]
    assert network == ["scripts", "test", "network", "CELL", "-k", "this or that"]
