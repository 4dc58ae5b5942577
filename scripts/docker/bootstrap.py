"""Install and start Docker and the build tools, from this system's packages, where that is allowed."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import docker
from docker.errors import DockerException

from scripts.docker import client, endpoint
from scripts.docker.client import ANSWER_SECONDS, SOCKET, SYSTEMD, connect, output_of, run_captured
from scripts.errors import UserError
from scripts.processes import captured

LOG = Path("/var/log/rlhf-stacks-dockerd.log")
OS_RELEASE = Path("/etc/os-release")
START_SECONDS = 60
INSTALL_SECONDS = 900
# Packages of releases that ship Docker's client and builder separately; older ones have both in docker.io.
SEPARATE = ("docker-cli", "docker-buildx")


def ensure(is_root: bool) -> None:
    """Start Docker and install the build tools if necessary; a `UserError` names what is not permitted.

    ``is_root`` is whether root builds, who needs fewer tools.
    """
    chosen = endpoint.chosen(os.environ)
    answers = _answers()
    if not answers and chosen:
        connect()
    commands = client.candidates(os.get_exec_path())
    can_build = client.choose(commands, output_of) is not None
    if not can_build:
        client.refuse_podman(commands)  # the package of Docker would replace it
    if packages := missing_packages(_has, answers, can_build, is_root):
        install(packages)
    if not answers and not _answers():
        start()
    connect()
    client.docker_command()


def missing_packages(has: Callable[[str], bool], answers: bool, can_build: bool, is_root: bool) -> list[str]:
    """The Debian packages to install; ``has`` is whether a command or a file exists.

    Those of `SEPARATE` are listed on every release; `install` omits what a release does not have.
    """
    packages = []
    if not answers and not has("dockerd"):
        packages += ["docker.io", "iptables"]
    if not can_build and not has("docker"):
        packages += [*([] if "docker.io" in packages else ["docker.io"]), "docker-cli"]
    if not can_build:
        packages.append("docker-buildx")
    packages += [name for name in ("mmdebstrap", "git", "zstd") if not has(name)]
    if not is_root and not has("newuidmap"):
        packages.append("uidmap")
    return packages


def install(packages: Sequence[str]) -> None:
    """Install Debian packages, as root or by a sudo that needs no password."""
    if not _is_debian(OS_RELEASE.read_text(encoding="utf-8") if OS_RELEASE.exists() else ""):
        raise UserError(
            f"this needs Debian's packages {' '.join(packages)}, or their equivalents: "
            "install them with your system's tools"
        )
    prefix = _as_root(_instruction(packages))
    _apt_get(prefix, ["update"], packages)
    if names := available(packages, output_of):
        print(f"installing from this system's packages, once: {' '.join(names)}", flush=True)
        _apt_get(prefix, ["install", "--no-install-recommends", *names], packages)


def unpack(package: str, folder: Path) -> None:
    """Unpack a Debian package into ``folder`` without installing it, so that none of its services starts.

    Needs no root where apt has its lists. A `UserError` explains why the package is unavailable.
    """
    if not _is_debian(OS_RELEASE.read_text(encoding="utf-8") if OS_RELEASE.exists() else ""):
        raise UserError(f"this needs Debian's package {package}: install it with your system's tools")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        download = ["apt-get", "--quiet", "--yes", "download", package]
        done = run_captured(download, Path(temporary))
        if done.returncode:
            _apt_get(_as_root(_instruction([package])), ["update"], [package])
            done = run_captured(download, Path(temporary))
        found = list(Path(temporary).glob("*.deb"))
        if not found or not _succeeds(["dpkg-deb", "--extract", str(found[0]), str(folder)]):
            raise UserError(
                f"apt-get download {package} failed ({_last_line(done)}); {_instruction([package])}"
            )


def available(packages: Sequence[str], output: Callable[[Sequence[str]], str]) -> list[str]:
    """``packages`` without those of `SEPARATE` that this release does not have."""
    return [name for name in packages if name not in SEPARATE or output(["apt-cache", "show", name])]


def _instruction(packages: Sequence[str]) -> str:
    """The command that installs all ``packages``, for a user who may use sudo."""
    names = " ".join(available(packages, output_of))
    joins = "docker.io" in packages and os.geteuid() != 0
    group = " && sudo usermod -aG docker $USER`, then log in again" if joins else "`"
    return f"this needs the packages {names}: run `sudo apt-get install --yes {names}{group}"


def _apt_get(prefix: Sequence[str], arguments: Sequence[str], packages: Sequence[str]) -> None:
    """Run apt-get; a `UserError` quotes the last line of its output if it fails."""
    command = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet", "--yes", *arguments]
    try:
        done = captured(command, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"apt-get {arguments[0]} did not end within {INSTALL_SECONDS} s: run `sudo dpkg --configure -a`; "
            f"{_instruction(packages)}"
        ) from None
    if done.returncode:
        raise UserError(f"apt-get {arguments[0]} failed ({_last_line(done)}); {_instruction(packages)}")


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]


def start() -> None:
    """Start Docker on this machine and wait until it answers, `START_SECONDS` at most."""
    if _is_forbidden(SOCKET):
        connect()
    prefix = _as_root(f"Docker Engine is not running: run `{client.start_command()}`")
    if SYSTEMD.is_dir():
        print("starting Docker Engine with systemctl", flush=True)
        command, log = ["systemctl", "start", "docker"], "journalctl -u docker"
    else:
        print(f"starting Docker Engine (dockerd); its log: {LOG}", flush=True)
        command, log = ["sh", "-c", f"setsid dockerd >>{LOG} 2>&1 </dev/null &"], str(LOG)
    with contextlib.suppress(subprocess.TimeoutExpired):  # what it has started may answer
        subprocess.run(
            [*prefix, *command],
            env={**os.environ, "PATH": client.system_path()},
            stdin=subprocess.DEVNULL,
            check=False,
            timeout=START_SECONDS,
        )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if _answers() or _is_forbidden(SOCKET):
            return
        time.sleep(0.5)
    raise UserError(f"Docker Engine did not answer within {START_SECONDS} s of its start; see {log}")


def _answers() -> bool:
    try:
        return bool(docker.from_env(timeout=ANSWER_SECONDS).ping())
    except (DockerException, OSError, ValueError):
        return False


def _is_forbidden(socket: Path) -> bool:
    """Whether Docker runs but this user has no permission to use its socket."""
    return socket.exists() and not os.access(socket, os.W_OK)


def _has(name: str) -> bool:
    return Path(name).exists() if "/" in name else shutil.which(name, path=client.system_path()) is not None


def _as_root(instruction: str) -> list[str]:
    """The words before a command that run it as root; a `UserError` with ``instruction`` if not permitted."""
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") and _succeeds(["sudo", "-n", "true"]):
        return ["sudo", "-n"]
    raise UserError(instruction)


def _is_debian(os_release: str) -> bool:
    """Whether ``os_release`` (that file's text) is of Debian, Ubuntu or a derived system."""
    kinds = re.findall(r'^ID(?:_LIKE)?="?([^"\n]*)', os_release, flags=re.MULTILINE)
    return bool({"debian", "ubuntu"} & set(" ".join(kinds).split()))


def _succeeds(command: Sequence[str]) -> bool:
    return run_captured(command).returncode == 0
