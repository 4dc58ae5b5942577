"""Docker: find it, set it up, say in one line what is wrong with it.

``python -m scripts.docker.bootstrap ensure`` installs and starts what is missing, where that is allowed.
"""

import argparse
import functools
import grp
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import docker
import requests.exceptions
from docker.errors import DockerException

from scripts.errors import UserError, run

SOCKET = Path("/var/run/docker.sock")
LOG = Path("/var/log/rlhf-stacks-dockerd.log")
CONTAINERD = Path("/var/lib/containerd")
SYSTEMD = Path("/run/systemd/system")
OS_RELEASE = Path("/etc/os-release")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SYSTEM_DOCKER = Path("/usr/bin/docker")
LAST_WITHOUT_BUILDX = 22
ANSWER_SECONDS = 60
START_SECONDS = 60
INSTALL_SECONDS = 900
# Packages of releases that have Docker's client and its builder apart; older ones have both in docker.io.
APART = ("docker-cli", "docker-buildx")
SETUP = "bash scripts/nox.sh -s base"


def client(seconds: int = ANSWER_SECONDS) -> docker.DockerClient:
    """A client of the engine, which has answered; a `UserError` says why there is none and what to do.

    The engine may be silent for ``seconds`` in each of its answers.
    """
    try:
        found = docker.from_env(timeout=seconds)
        found.ping()
    except (DockerException, OSError, ValueError) as error:
        raise UserError(explain(error, os.environ, installed())) from None
    return found


def explain(error: BaseException, environment: Mapping[str, str], has_engine: bool) -> str:
    """Why the engine could not be asked, and what to do about it."""
    host = environment.get("DOCKER_HOST")
    causes = list(_causes(error))
    if any(isinstance(cause, PermissionError) for cause in causes):
        return (
            f"no right to use Docker's socket, which belongs to the group {_group(SOCKET)!r}: "
            f"run `sudo usermod -aG {_group(SOCKET)} $USER`, then log in again"
        )
    if host:
        return (
            f"no Docker Engine answers at DOCKER_HOST={host}: correct it, or unset it to use this machine's"
        )
    if not has_engine:
        return (
            "Docker Engine is not installed: `sudo apt-get install docker.io` on Debian or Ubuntu, "
            f"or `{SETUP}` as root"
        )
    if any(isinstance(cause, FileNotFoundError | ConnectionRefusedError) for cause in causes):
        return f"Docker Engine is not running: `{_start_command()}`, or `{SETUP}` as root"
    return f"Docker Engine does not answer: {' '.join(str(error).split())}"


def asked(main: Callable[[], int]) -> Callable[[], int]:
    """``main``, with what the engine answers to a request that it cannot meet made a `UserError`."""

    def guarded() -> int:
        try:
            return main()
        except (DockerException, requests.exceptions.RequestException) as error:
            told = getattr(error, "explanation", None) or str(error)
            raise UserError(f"Docker Engine: {' '.join(str(told).split())}") from error

    return guarded


def installed() -> bool:
    """Whether this machine has an engine of its own."""
    return shutil.which("dockerd", path=_path()) is not None


@functools.cache
def builder() -> list[str]:
    """A ``docker`` command that builds with BuildKit: one with buildx, else one that has it built in."""
    found = choose(candidates(os.get_exec_path()), _prints)
    if found is None:
        raise UserError(
            "no docker command here can build with BuildKit: "
            "`sudo apt-get install docker.io docker-buildx` (Ubuntu, Debian 13) or `docker.io` (Debian 12)"
        )
    return [str(found)]


def candidates(folders: Iterable[str]) -> list[Path]:
    """Every ``docker`` in ``folders`` and Debian's own, each file once."""
    paths = [*(Path(folder, "docker") for folder in folders), SYSTEM_DOCKER]
    return list({path.resolve(): path for path in reversed(paths) if os.access(path, os.X_OK)}.values())[::-1]


def choose(clients: Sequence[Path], prints: Callable[[Sequence[str]], str]) -> Path | None:
    """The client to build with; ``prints`` runs a command and gives its output, empty if it failed."""
    for path in clients:
        if "buildx" in prints([str(path), "buildx", "version"]):
            return path
    for path in clients:
        version = re.search(r"version (\d+)\.", prints([str(path), "--version"]))
        if version and int(version[1]) <= LAST_WITHOUT_BUILDX:
            return path
    return None


def need_space(megabytes: int) -> None:
    """A `UserError` unless the engine's disk has ``megabytes`` (10^6 bytes) free on this machine."""
    root = store(client().info())
    if os.environ.get("DOCKER_HOST", "unix:").startswith("unix:") and root.exists():
        check_space(root, megabytes, shutil.disk_usage(root).free)


def store(info: Mapping[str, Any]) -> Path:
    """Where an engine keeps images, by its info; new ones leave that to containerd.

    The folder is not on this machine where the engine runs in a virtual one.
    """
    if ["driver-type", "io.containerd.snapshotter.v1"] in (info.get("DriverStatus") or []):
        return CONTAINERD
    return Path(info["DockerRootDir"])


def check_space(root: Path, megabytes: int, free_bytes: int) -> None:
    """A `UserError` when ``free_bytes`` are fewer than ``megabytes`` (10^6 bytes)."""
    free = free_bytes // 10**6
    if free < megabytes:
        raise UserError(
            f"no space left: this needs {megabytes} MB in {root}, which has {free} MB; "
            "`docker system prune` frees what no container uses"
        )


def missing(has: Callable[[str], bool], answers: bool, can_build: bool, is_root: bool) -> list[str]:
    """The Debian packages to install; ``has`` tells whether a command or a file is there.

    Those `APART` are among them on every release; `install` leaves out what a release does not have.
    """
    packages = []
    if not answers and not has("dockerd"):
        packages += ["docker.io", "iptables"]
    if not can_build and not has("docker"):
        packages += [*([] if "docker.io" in packages else ["docker.io"]), "docker-cli"]
    if not can_build:
        packages.append("docker-buildx")
    packages += [name for name in ("mmdebstrap", "git") if not has(name)]
    if not is_root and not has("newuidmap"):
        packages.append("uidmap")
    if not has(str(KEYRING)):
        packages.append("debian-archive-keyring")
    return packages


def ensure() -> None:
    """Make the engine answer and the build tools be there; a `UserError` says what is not allowed."""
    answers = _answers()
    if not answers and os.environ.get("DOCKER_HOST"):
        client()
    can_build = choose(candidates(os.get_exec_path()), _prints) is not None
    if packages := missing(_has, answers, can_build, os.geteuid() == 0):
        install(packages)
    if not answers and not _answers():
        start()
    client()
    builder()


def install(packages: Sequence[str]) -> None:
    """Install Debian packages, as root or by a sudo that asks for no password."""
    if not _is_debian(OS_RELEASE.read_text(encoding="utf-8") if OS_RELEASE.exists() else ""):
        raise UserError(
            f"this needs, by the names of Debian's packages, {' '.join(packages)}: "
            "install them with your system's tools"
        )
    prefix = _as_root(_wish(packages))
    _apt_get(prefix, ["update"], packages)
    if names := offered(packages, _prints):
        print(f"installing from this system's packages, once: {' '.join(names)}", flush=True)
        _apt_get(prefix, ["install", "--no-install-recommends", *names], packages)


def unpack(package: str, folder: Path) -> None:
    """Unpack a Debian package into ``folder`` without installing it, so that no service of it starts.

    Needs no root where apt has its lists. A `UserError` says why it cannot be had.
    """
    if not _is_debian(OS_RELEASE.read_text(encoding="utf-8") if OS_RELEASE.exists() else ""):
        raise UserError(f"this needs Debian's package {package}: install it with your system's tools")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        download = ["apt-get", "--quiet", "--yes", "download", package]
        done = _result(download, Path(temporary))
        if done.returncode:
            _apt_get(_as_root(_wish([package])), ["update"], [package])
            done = _result(download, Path(temporary))
        found = list(Path(temporary).glob("*.deb"))
        if not found or not _succeeds(["dpkg-deb", "--extract", str(found[0]), str(folder)]):
            raise UserError(f"apt-get download {package} failed ({_last(done)}); {_wish([package])}")


def offered(packages: Sequence[str], prints: Callable[[Sequence[str]], str]) -> list[str]:
    """``packages`` without those `APART` that this release does not have."""
    return [name for name in packages if name not in APART or prints(["apt-cache", "show", name])]


def _wish(packages: Sequence[str]) -> str:
    """What a user without rights is told: all of it at once."""
    names = " ".join(offered(packages, _prints))
    joins = "docker.io" in packages and os.geteuid() != 0
    group = " && sudo usermod -aG docker $USER`, then log in again" if joins else "`"
    return f"this needs the packages {names}: run `sudo apt-get install --yes {names}{group}"


def _apt_get(prefix: Sequence[str], arguments: Sequence[str], packages: Sequence[str]) -> None:
    """Run apt-get; a `UserError` has the line that tells why it failed."""
    done = subprocess.run(
        [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--quiet", "--yes", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=INSTALL_SECONDS,
    )
    if done.returncode:
        raise UserError(f"apt-get {arguments[0]} failed ({_last(done)}); {_wish(packages)}")


def _last(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]


def start() -> None:
    """Start this machine's engine and wait until it answers, `START_SECONDS` at most."""
    if _forbidden(SOCKET):
        client()
    prefix = _as_root(f"Docker Engine is not running: run `{_start_command()}`")
    if SYSTEMD.is_dir():
        print("starting Docker Engine with systemctl", flush=True)
        command, log = ["systemctl", "start", "docker"], "journalctl -u docker"
    else:
        print(f"starting Docker Engine (dockerd); its log: {LOG}", flush=True)
        command, log = ["sh", "-c", f"setsid dockerd >>{LOG} 2>&1 </dev/null &"], str(LOG)
    subprocess.run(
        [*prefix, *command],
        env={**os.environ, "PATH": _path()},
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=START_SECONDS,
    )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if _answers() or _forbidden(SOCKET):
            return
        time.sleep(0.5)
    raise UserError(f"Docker Engine did not answer within {START_SECONDS} s of its start; why is in {log}")


def _start_command() -> str:
    return f"sudo {'systemctl start docker' if SYSTEMD.is_dir() else 'service docker start'}"


def _answers() -> bool:
    try:
        return bool(docker.from_env(timeout=ANSWER_SECONDS).ping())
    except (DockerException, OSError, ValueError):
        return False


def _forbidden(socket: Path) -> bool:
    """Whether an engine is there whose socket this user may not use."""
    return socket.exists() and not os.access(socket, os.W_OK)


def _has(name: str) -> bool:
    return Path(name).exists() if "/" in name else shutil.which(name, path=_path()) is not None


def _path() -> str:
    """PATH with the folders of root's commands, which a user's own may lack."""
    return os.pathsep.join([*os.get_exec_path(), "/usr/sbin", "/sbin"])


def _as_root(wish: str) -> list[str]:
    """What to put before a command to run it as root; a `UserError` with the wish where that is not allowed."""
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") and _succeeds(["sudo", "-n", "true"]):
        return ["sudo", "-n"]
    raise UserError(wish)


def _is_debian(os_release: str) -> bool:
    """Whether ``os_release`` (that file's text) is of Debian, Ubuntu or a system made from one."""
    kinds = re.findall(r'^ID(?:_LIKE)?="?([^"\n]*)', os_release, flags=re.MULTILINE)
    return bool({"debian", "ubuntu"} & set(" ".join(kinds).split()))


def _succeeds(command: Sequence[str]) -> bool:
    return _result(command).returncode == 0


def _prints(command: Sequence[str]) -> str:
    done = _result(command)
    return done.stdout if done.returncode == 0 else ""


def _result(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=ANSWER_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _causes(error: BaseException | None) -> Iterable[BaseException]:
    """An exception, what it was raised from, and the exceptions in their arguments, each once."""
    waiting, seen = [error], set[int]()
    while waiting:
        cause = waiting.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            inner = [item for item in cause.args if isinstance(item, BaseException)]
            waiting += [cause.__cause__, cause.__context__, getattr(cause, "reason", None), *inner]


def _group(socket: Path) -> str:
    try:
        return grp.getgrgid(socket.stat().st_gid).gr_name
    except (OSError, KeyError):
        return "docker"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.docker.bootstrap", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("command", choices=["ensure"], help="set Docker up and wait until it answers")
    parser.parse_args()
    ensure()
    version = client().version()["Version"]
    print(f"Docker Engine {version}; builds with {builder()[0]}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run(main)
