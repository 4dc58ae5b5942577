"""Connect to Docker, choose its command, and explain in one line why it cannot be used."""

import functools
import grp
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import docker
import requests.exceptions
from docker.errors import DockerException

from scripts.docker import endpoint
from scripts.docker.endpoint import Endpoint
from scripts.errors import UserError
from scripts.processes import captured

SOCKET = Path("/var/run/docker.sock")
CONTAINERD, SYSTEMS = Path("/var/lib/containerd"), "/run/containerd/containerd.sock"
SYSTEMD = Path("/run/systemd/system")
SYSTEM_DOCKER = Path("/usr/bin/docker")
LAST_WITHOUT_BUILDX = 22
ANSWER_SECONDS = 60
SETUP = "sudo bash scripts/nox.sh -s roots"

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def connect(seconds: int = ANSWER_SECONDS) -> docker.DockerClient:
    """A client of Docker, which has answered; a `UserError` explains why there is none and what to do.

    Each request may take ``seconds``.
    """
    chosen = endpoint.chosen(os.environ)
    try:
        client = docker.from_env(timeout=seconds)
        client.ping()
    except (DockerException, OSError, ValueError) as error:
        raise UserError(explain(error, chosen, is_installed())) from None
    return client


def explain(error: BaseException, chosen: Endpoint | None, has_docker: bool) -> str:
    """Why Docker cannot be reached, and what to do about it; ``chosen`` is the user's choice of an Engine."""
    causes = list(_causes(error))
    if any(isinstance(cause, PermissionError) for cause in causes):
        return (
            f"no permission to use Docker's socket, which belongs to the group {_group(SOCKET)!r}: "
            f"run `sudo usermod -aG {_group(SOCKET)} $USER`, then log in again"
        )
    if chosen:
        return (
            f"no Docker Engine answers at {chosen.choice} ({' '.join(str(error).split())}): correct it, "
            f"or `{chosen.undo}` to use this machine's"
        )
    if not has_docker:
        return (
            "Docker Engine is not installed: `sudo apt-get install docker.io` on Debian or Ubuntu, "
            f"or `{SETUP}`"
        )
    if any(isinstance(cause, FileNotFoundError | ConnectionRefusedError) for cause in causes):
        return f"Docker Engine is not running: `{start_command()}`, or `{SETUP}`"
    return f"Docker Engine does not answer: {' '.join(str(error).split())}"


def with_docker_errors(main: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """``main`` with Docker's errors raised as a `UserError` that quotes Docker's message."""

    @functools.wraps(main)
    def guarded(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        try:
            return main(*arguments, **options)
        except (DockerException, requests.exceptions.RequestException) as error:
            message = getattr(error, "explanation", None) or str(error)
            raise UserError(f"Docker Engine: {' '.join(str(message).split())}") from error

    return guarded


def is_installed() -> bool:
    """Whether Docker Engine is installed on this machine."""
    return shutil.which("dockerd", path=system_path()) is not None


@functools.cache
def docker_command() -> list[str]:
    """A ``docker`` command that builds with BuildKit: one with buildx, else one that has it built in."""
    commands = candidates(os.get_exec_path())
    found = choose(commands, output_of)
    if found is None:
        refuse_podman(commands)
        raise UserError(
            "no docker command on this machine can build with BuildKit: "
            "`sudo apt-get install docker.io docker-buildx` (Ubuntu, Debian 13) or `docker.io` (Debian 12)"
        )
    return [str(found)]


def candidates(folders: Iterable[str]) -> list[Path]:
    """Every ``docker`` in ``folders`` and Debian's own, each file once."""
    paths = [*(Path(folder, "docker") for folder in folders), SYSTEM_DOCKER]
    return list({path.resolve(): path for path in reversed(paths) if os.access(path, os.X_OK)}.values())[::-1]


def choose(commands: Sequence[Path], output: Callable[[Sequence[str]], str]) -> Path | None:
    """The ``docker`` command to build with, None without one.

    ``output`` runs a command and returns what it prints, empty if it failed.
    """
    commands = [path for path in commands if not is_podman(path, output)]
    for path in commands:
        if "buildx" in output([str(path), "buildx", "version"]):
            return path
    for path in commands:
        version = re.search(r"version (\d+)\.", output([str(path), "--version"]))
        if version and int(version[1]) <= LAST_WITHOUT_BUILDX:
            return path
    return None


def refuse_podman(commands: Iterable[Path]) -> None:
    """Raise a `UserError` if one of the ``docker`` commands is Podman's."""
    if podman := next((path for path in commands if is_podman(path, output_of)), None):
        raise UserError(
            f"this docker command is Podman ({podman}); Docker Engine with BuildKit is required: "
            "`sudo apt-get install docker.io docker-buildx`, and put its command before Podman's in PATH"
        )


def is_podman(path: Path, output: Callable[[Sequence[str]], str]) -> bool:
    """Whether a ``docker`` command is Podman's, whose version looks like that of an old Docker."""
    return "podman" in output([str(path), "--version"]).lower()


def build_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """``variables`` for ``docker build``: BuildKit, without attestations, with Docker's own builder.

    The result of a builder that the user chose (``BUILDX_BUILDER``, ``docker buildx use``) may stay in it.
    """
    settings = {"DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1", "BUILDX_BUILDER": "default"}
    return {**variables, **settings}


def need_space(megabytes: int) -> None:
    """Raise a `UserError` unless Docker's disk has ``megabytes`` (10^6 bytes) free on this machine."""
    root = image_store(connect().info())
    chosen = endpoint.chosen(os.environ)
    if (chosen is None or chosen.address.startswith("unix:")) and root.exists():
        check_space(root, megabytes, shutil.disk_usage(root).free)


def image_store(info: Mapping[str, Any]) -> Path:
    """The folder in which Docker stores images, from its ``info``; in recent releases containerd stores them.

    That of the system has a folder of its own; one that dockerd has started stores them in Docker's.
    The folder is not on this machine where Docker runs in a virtual one.
    """
    is_in_containerd = ["driver-type", "io.containerd.snapshotter.v1"] in (info.get("DriverStatus") or [])
    if is_in_containerd and (info.get("Containerd") or {}).get("Address", SYSTEMS) == SYSTEMS:
        return CONTAINERD
    return Path(info["DockerRootDir"])


def check_space(root: Path, megabytes: int, free_bytes: int) -> None:
    """Raise a `UserError` when ``free_bytes`` are fewer than ``megabytes`` (10^6 bytes)."""
    free = free_bytes // 10**6
    if free < megabytes:
        raise UserError(
            f"no space left: this needs {megabytes} MB in {root}, which has {free} MB; "
            "`docker image prune --filter label=io.rlhf-stacks.cell` removes this project's replaced images, "
            "`docker builder prune` the cache of every build"
        )


def start_command() -> str:
    """The command that starts Docker on this machine."""
    return f"sudo {'systemctl start docker' if SYSTEMD.is_dir() else 'service docker start'}"


def system_path() -> str:
    """PATH with the folders of root's commands, which a user's PATH may lack."""
    return os.pathsep.join([*os.get_exec_path(), "/usr/sbin", "/sbin"])


def output_of(command: Sequence[str]) -> str:
    """The standard output of ``command``, empty if it failed."""
    done = run_captured(command)
    return done.stdout if done.returncode == 0 else ""


def run_captured(command: Sequence[str], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``command`` without input; one that cannot start or exceeds `ANSWER_SECONDS` has exit code 1."""
    try:
        return captured(command, folder, timeout=ANSWER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _causes(error: BaseException | None) -> Iterable[BaseException]:
    """Yield an exception, its causes, and the exceptions in their arguments, each once."""
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
