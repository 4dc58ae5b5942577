"""The script that makes nox's environment, tried on a made-up lock, and the sessions of the noxfile."""

import base64
import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nox import registry

from scripts import lint
from scripts.matrix import load as matrix_module
from scripts.matrix.load import expand, load
from scripts.paths import ROOT

MATRIX = load()
SESSIONS = [
    "lint",
    "unit",
    "lock",
    "base",
    "build",
    "image",
    "cluster",
    "integration",
    "network",
    "patches",
    "knownbad",
    "registry",
    "faults",
    "catalogue",
    "publish",
    "demo",
    "tests",
    "others",
    "full",
]


def wheel(folder: Path, version: str) -> str:
    """Make a package ``nox`` that prints its version and arguments; its line in a lock."""
    folder.mkdir(exist_ok=True)
    info = f"nox-{version}.dist-info"
    files = {
        "nox/__init__.py": "",
        "nox/__main__.py": f"import os, sys\nprint('nox {version}', *sys.argv[1:], os.getcwd())\n",
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


class Project:
    """A folder with nox.sh and a lock of one made-up package, which no index has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = folder / ".nox" / "host"
        (folder / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "nox.sh", folder / "scripts")
        self.lock(wheel(folder / "wheels", "1.0"))

    def lock(self, text: str) -> None:
        (self.folder / "scripts" / "requirements.txt").write_text(text, encoding="utf-8")

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        settings = {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.folder / "wheels"),
            "PIP_CONFIG_FILE": os.devnull,
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


def test_the_environment_is_made_once_and_anew_when_it_is_broken_or_the_lock_changed(
    project: Project,
) -> None:
    (project.environment / "bin").mkdir(parents=True)  # a former attempt that was cut short
    first = project.run("-s", "a b")
    assert (first.returncode, first.stdout) == (0, f"nox 1.0 -s a b {project.folder}\n"), first.stderr
    assert "making the host's environment" in first.stderr
    assert project.run().stderr == "", "a second run must install nothing"
    other = os.pathsep.join([str(project.environment / "bin"), os.environ["PATH"]])
    assert project.run(PATH=other).stderr == "", "nor one that finds another Python first"

    (project.environment / "bin" / "python").unlink()
    assert "making the host's environment" in project.run().stderr, "a broken one must be made anew"

    project.lock(wheel(project.folder / "wheels", "2.0"))
    changed = project.run()
    assert changed.stdout.startswith("nox 2.0"), changed.stderr
    assert project.run().stderr == ""


def test_what_cannot_be_installed_is_told_and_leaves_no_stamp(project: Project) -> None:
    failed = project.run(PIP_FIND_LINKS="/nowhere")
    assert failed.returncode == 2
    assert (
        "error: the host's tools could not be installed: check the network" in failed.stderr.splitlines()[-1]
    )
    assert not (project.environment / "stamp").exists()


def test_a_file_with_another_hash_is_refused(project: Project) -> None:
    project.lock("nox==1.0 --hash=sha256:" + "0" * 64 + "\n")
    failed = project.run()
    assert failed.returncode == 2
    assert "DO NOT MATCH THE HASHES" in failed.stderr


def test_a_machine_without_python_and_rights_is_told_what_to_run(project: Project, tmp_path: Path) -> None:
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


def nox(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nox", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_session_is_listed_with_one_sentence() -> None:
    listed = [line for line in nox("--list").stdout.splitlines() if line[:2] in ("- ", "* ")]
    assert list(dict.fromkeys(line[2:].split("(")[0].split(" ")[0] for line in listed)) == SESSIONS
    for line in listed:
        sentence = line.partition(" -> ")[2]
        assert sentence.endswith(".")
        assert sentence.count(". ") == 0


def test_a_wrong_cell_is_told_the_nearest_in_one_line() -> None:
    done = nox("-s", "build(cell='ray2.55.0-vllm0.29-cpu')")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"did you mean '{MATRIX.default}'" in done.stderr


def test_without_the_environment_one_line_says_what_to_run() -> None:
    code = f"""import runpy, sys
sys.modules["msgspec"] = None
sys.argv = ["nox", "-l"]
runpy.run_path({str(ROOT / "noxfile.py")!r})"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: msgspec is not in this environment: run `bash scripts/nox.sh -l` instead\n"


@pytest.fixture
def two_cells(monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Our matrix with a second Ray; the ids of the default cell and of the other."""
    entry = MATRIX.cells[0]
    other = msgspec.structs.replace(entry, ray=msgspec.structs.replace(entry.ray, version="2.54.0"))
    doubled = msgspec.structs.replace(MATRIX, cells=(other, entry))
    monkeypatch.setattr(matrix_module, "load", lambda: doubled)
    return MATRIX.default, expand(doubled)[0].id


def cells(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    """The cells for which the noxfile offers its sessions when nox is given ``arguments``."""
    monkeypatch.setattr(sys, "argv", ["nox", *arguments])
    monkeypatch.setattr(registry, "_REGISTRY", {})
    found: dict[str, Any] = runpy.run_path(str(ROOT / "noxfile.py"))
    chosen: list[str] = found["CELLS"]
    return chosen


def test_a_plain_session_runs_for_the_default_cell_alone(
    two_cells: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    default, other = two_cells
    assert cells(monkeypatch, "-s", "build") == [default]
    assert cells(monkeypatch, "-s", f"build(cell='{other}')") == [other, default]
    assert cells(monkeypatch, "-s", f'build(cell="{other}")') == [other, default]
    assert cells(monkeypatch, "--list") == [other, default]


def test_a_script_is_known_by_its_first_line(tmp_path: Path) -> None:
    texts = {
        "a": "#!/bin/sh\n",
        "b": "#!/usr/bin/env bash\n",
        "c.sh": "echo\n",
        "d": "#!/usr/bin/python3\n",
        "e": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = [tmp_path / name for name in (*texts, "absent")]
    assert lint.shell_scripts(files) == [tmp_path / "a", tmp_path / "b"]


def test_lint_names_every_check_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lint, "checks", lambda: {"good": ["true"], "bad": ["false"], "worse": ["false"]})
    assert lint.main() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "failed: bad, worse"
    monkeypatch.setattr(lint, "checks", lambda: {"good": ["true"]})
    assert lint.main() == 0
