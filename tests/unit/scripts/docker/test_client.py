"""Docker's client: the command that builds, and the messages when Docker is missing, stopped or forbidden."""

import functools
from pathlib import Path
from typing import Any

import pytest
from docker.errors import DockerException

from scripts.docker import bootstrap, client
from scripts.docker.endpoint import Endpoint
from scripts.errors import UserError

HOST = Endpoint("tcp://h:1", "DOCKER_HOST=tcp://h:1", "unset DOCKER_HOST")
WITHOUT_BUILDX = 'case "$1" in --version) echo "Docker version {version}, build x";; *) exit 1;; esac'
WITH_BUILDX = (
    'case "$1" in buildx) echo "github.com/docker/buildx v0.1";; *) echo "Docker version 28.0.0,";; esac'
)


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def fake_docker(folder: Path, version: str) -> Path:
    return script(folder / "docker", WITHOUT_BUILDX.replace("{version}", version))


def test_a_command_with_buildx_is_preferred(tmp_path: Path) -> None:
    fake_docker(tmp_path / "a", "20.10.24")
    good = script(tmp_path / "b" / "docker", WITH_BUILDX)
    assert (
        client.choose(client.candidates([str(tmp_path / "a"), str(tmp_path / "b")]), client.output_of) == good
    )


def test_an_old_command_is_preferred_to_a_new_one_without_buildx(tmp_path: Path) -> None:
    new, old = fake_docker(tmp_path / "new", "28.2.2"), fake_docker(tmp_path / "old", "20.10.24")
    assert client.choose([new, old], client.output_of) == old
    assert client.choose([new], client.output_of) is None


def test_a_command_that_does_not_run_is_ignored(tmp_path: Path) -> None:
    broken = tmp_path / "docker"
    broken.write_text("no program", encoding="utf-8")
    broken.chmod(0o755)
    assert client.choose([broken, tmp_path / "absent"], client.output_of) is None


def test_a_command_found_twice_is_one_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fake_docker(tmp_path / "real", "20.10.24")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "docker").symlink_to(real)
    monkeypatch.setattr(client, "SYSTEM_DOCKER", real)
    assert len(client.candidates([str(tmp_path / "link"), str(tmp_path / "real"), str(tmp_path)])) == 1


def test_the_error_without_a_command_that_builds_names_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_docker(tmp_path, "28.2.2")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(client, "SYSTEM_DOCKER", tmp_path / "absent")
    with pytest.raises(
        UserError, match="no docker command on this machine can build with BuildKit: `sudo apt-get install"
    ):
        client.docker_command()


def test_podman_is_not_mistaken_for_an_old_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command is often `docker` on PATH, with a version that is small and a `buildx` of its own."""
    body = 'case "$1" in buildx) echo "buildah 1.33";; *) echo "podman version 4.3.1";; esac'
    shim = script(tmp_path / "docker", body.replace("buildah", "buildx, buildah"))
    assert client.choose([shim], client.output_of) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(client, "SYSTEM_DOCKER", tmp_path / "absent")
    monkeypatch.setattr(bootstrap, "_answers", lambda: True)
    for use in (client.docker_command, functools.partial(bootstrap.ensure, is_root=True)):
        with pytest.raises(
            UserError, match=r"^this docker command is Podman \(.*\); Docker Engine with Build"
        ):
            use()


def test_a_build_ignores_the_builder_that_the_user_chose() -> None:
    environment = client.build_environment({"BUILDX_BUILDER": "remote", "PATH": "/bin"})
    assert (environment["BUILDX_BUILDER"], environment["PATH"]) == ("default", "/bin")


def failure(cause: BaseException) -> DockerException:
    """What the SDK raises: the cause lies inside other exceptions' arguments."""
    error = DockerException(f"Error while fetching server API version: {cause}")
    error.__cause__ = ConnectionError("Connection aborted.", cause)
    return error


@pytest.mark.parametrize(
    ("cause", "chosen", "has_docker", "message"),
    [
        (FileNotFoundError(2, "no"), None, False, "Docker Engine is not installed: `sudo apt-get install"),
        (FileNotFoundError(2, "no"), None, True, "Docker Engine is not running: `sudo "),
        (ConnectionRefusedError(111, "no"), None, True, "Docker Engine is not running"),
        (PermissionError(13, "no"), None, True, "no permission to use Docker's socket, which belongs to"),
        (TimeoutError("slow"), None, True, "Docker Engine does not answer: "),
        (ConnectionRefusedError(111, "no"), HOST, True, "no Docker Engine answers at DOCKER_HOST=tcp://h:1"),
    ],
)
def test_the_reason_why_docker_is_unreachable_is_one_line(
    cause: BaseException, chosen: Endpoint | None, has_docker: bool, message: str
) -> None:
    line = client.explain(failure(cause), chosen, has_docker)
    assert line.startswith(message)
    assert "\n" not in line


def test_the_reason_of_a_docker_host_s_failure_is_in_the_error() -> None:
    error = DockerException("Install paramiko package to enable ssh:// support")
    assert "(Install paramiko package" in client.explain(error, HOST, True)


@pytest.mark.parametrize("host", ["unix:///nowhere.sock", "tcp://127.0.0.1:9", "nonsense"])
def test_an_unreachable_docker_host_is_an_error(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    for use in (client.connect, functools.partial(bootstrap.ensure, is_root=True)):
        with pytest.raises(UserError, match=f"no Docker Engine answers at DOCKER_HOST={host}"):
            use()


def test_too_little_space_is_an_error() -> None:
    client.check_space(Path("/d"), 9000, 9_000_000_000)
    with pytest.raises(
        UserError,
        match="no space left: this needs 9000 MB in /d, which has 8999 MB; `docker image prune --filter",
    ):
        client.check_space(Path("/d"), 9000, 8_999_999_999)


def test_space_is_checked_where_docker_stores_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info: dict[str, Any] = {"DockerRootDir": str(tmp_path / "in a virtual machine"), "DriverStatus": None}
    assert client.image_store(info) == Path(info["DockerRootDir"])
    new = {**info, "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}
    assert client.image_store(new) == client.CONTAINERD
    own = {**new, "Containerd": {"Address": "/var/run/docker/containerd/containerd.sock"}}
    assert client.image_store(own) == Path(info["DockerRootDir"])

    class Client:
        def info(self) -> dict[str, Any]:
            return info

    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(client, "connect", Client)
    client.need_space(10**12)
    info["DockerRootDir"] = str(tmp_path)
    with pytest.raises(UserError, match="no space left"):
        client.need_space(10**12)


@pytest.mark.parametrize(
    ("systemd", "command"), [(True, "systemctl start docker"), (False, "service docker start")]
)
def test_the_start_command_depends_on_systemd(
    systemd: bool, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(client, "SYSTEMD", tmp_path if systemd else tmp_path / "absent")
    line = client.explain(failure(FileNotFoundError(2, "no")), None, has_docker=True)
    assert line.startswith(f"Docker Engine is not running: `sudo {command}`")
