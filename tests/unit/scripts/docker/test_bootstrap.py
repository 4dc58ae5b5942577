"""What is said when Docker is missing, stopped or forbidden, and what is installed when it may be."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from docker.errors import DockerException

from scripts.docker import bootstrap
from scripts.errors import UserError

WITHOUT_BUILDX = 'case "$1" in --version) echo "Docker version {version}, build x";; *) exit 1;; esac'
WITH_BUILDX = (
    'case "$1" in buildx) echo "github.com/docker/buildx v0.1";; *) echo "Docker version 28.0.0,";; esac'
)


@pytest.fixture(autouse=True)
def _fresh_builder() -> None:
    bootstrap.builder.cache_clear()


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def fake_docker(folder: Path, version: str) -> Path:
    return script(folder / "docker", WITHOUT_BUILDX.replace("{version}", version))


def test_a_client_with_buildx_is_preferred(tmp_path: Path) -> None:
    fake_docker(tmp_path / "a", "20.10.24")
    good = script(tmp_path / "b" / "docker", WITH_BUILDX)
    assert (
        bootstrap.choose(bootstrap.candidates([str(tmp_path / "a"), str(tmp_path / "b")]), bootstrap._prints)
        == good
    )


def test_a_new_client_without_buildx_is_passed_over_for_an_old_one(tmp_path: Path) -> None:
    new, old = fake_docker(tmp_path / "new", "28.2.2"), fake_docker(tmp_path / "old", "20.10.24")
    assert bootstrap.choose([new, old], bootstrap._prints) == old
    assert bootstrap.choose([new], bootstrap._prints) is None


def test_a_client_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    broken = tmp_path / "docker"
    broken.write_text("no program", encoding="utf-8")
    broken.chmod(0o755)
    assert bootstrap.choose([broken, tmp_path / "absent"], bootstrap._prints) is None


def test_a_client_found_twice_is_one_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fake_docker(tmp_path / "real", "20.10.24")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "docker").symlink_to(real)
    monkeypatch.setattr(bootstrap, "SYSTEM_DOCKER", real)
    assert len(bootstrap.candidates([str(tmp_path / "link"), str(tmp_path / "real"), str(tmp_path)])) == 1


def test_no_client_that_builds_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_docker(tmp_path, "28.2.2")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bootstrap, "SYSTEM_DOCKER", tmp_path / "absent")
    with pytest.raises(
        UserError, match="no docker command here can build with BuildKit: `sudo apt-get install"
    ):
        bootstrap.builder()


def failure(cause: BaseException) -> DockerException:
    """What the SDK raises: the cause lies inside other exceptions' arguments."""
    error = DockerException(f"Error while fetching server API version: {cause}")
    error.__cause__ = ConnectionError("Connection aborted.", cause)
    return error


@pytest.mark.parametrize(
    ("cause", "environment", "has_engine", "told"),
    [
        (FileNotFoundError(2, "no"), {}, False, "Docker Engine is not installed: `sudo apt-get install"),
        (FileNotFoundError(2, "no"), {}, True, "Docker Engine is not running: `sudo "),
        (ConnectionRefusedError(111, "no"), {}, True, "Docker Engine is not running"),
        (PermissionError(13, "no"), {}, True, "no right to use Docker's socket, which belongs to the group"),
        (TimeoutError("slow"), {}, True, "Docker Engine does not answer: "),
        (ConnectionRefusedError(111, "no"), {"DOCKER_HOST": "tcp://h:1"}, True, "no Docker Engine answers at DOCKER_HOST=tcp://h:1"),
    ],
)  # fmt: skip
def test_why_the_engine_cannot_be_asked_is_one_line(
    cause: BaseException, environment: dict[str, str], has_engine: bool, told: str
) -> None:
    line = bootstrap.explain(failure(cause), environment, has_engine)
    assert line.startswith(told)
    assert "\n" not in line


@pytest.mark.parametrize("host", ["unix:///nowhere.sock", "tcp://127.0.0.1:9", "nonsense"])
def test_an_engine_that_is_not_there_is_told(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    for ask in (bootstrap.client, bootstrap.ensure):
        with pytest.raises(UserError, match=f"no Docker Engine answers at DOCKER_HOST={host}"):
            ask()


def test_too_little_space_is_told_before_a_build() -> None:
    bootstrap.check_space(Path("/d"), 9000, 9_000_000_000)
    with pytest.raises(
        UserError, match="no space left: this needs 9000 MB in /d, which has 8999 MB; `docker system prune`"
    ):
        bootstrap.check_space(Path("/d"), 9000, 8_999_999_999)


def test_space_is_looked_for_where_the_engine_keeps_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info: dict[str, Any] = {"DockerRootDir": str(tmp_path / "in a virtual machine"), "DriverStatus": None}
    assert bootstrap.store(info) == Path(info["DockerRootDir"])
    new = {**info, "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}
    assert bootstrap.store(new) == bootstrap.CONTAINERD

    class Client:
        def info(self) -> dict[str, Any]:
            return info

    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(bootstrap, "client", Client)
    bootstrap.need_space(10**12)
    info["DockerRootDir"] = str(tmp_path)
    with pytest.raises(UserError, match="no space left"):
        bootstrap.need_space(10**12)


ALL = {"dockerd", "docker", "mmdebstrap", "git", str(bootstrap.KEYRING)}


ENGINE = ["docker.io", "iptables"]
REST = ["mmdebstrap", "git", "debian-archive-keyring"]


@pytest.mark.parametrize(
    ("there", "answers", "can_build", "wanted"),
    [
        (ALL, True, True, []),
        (ALL, False, True, []),
        (ALL, True, False, ["docker-buildx"]),
        (ALL - {"docker"}, True, False, ["docker.io", "docker-cli", "docker-buildx"]),
        (ALL - {"mmdebstrap"}, True, True, ["mmdebstrap"]),
        (ALL - {"dockerd"}, False, False, [*ENGINE, "docker-buildx"]),
        (set(), False, False, [*ENGINE, "docker-cli", "docker-buildx", *REST]),
        ({"docker", "git"}, False, True, [*ENGINE, "mmdebstrap", "debian-archive-keyring"]),
    ],
)
def test_only_what_is_missing_is_installed(
    there: set[str], answers: bool, can_build: bool, wanted: list[str]
) -> None:
    assert bootstrap.missing(there.__contains__, answers, can_build, is_root=True) == wanted


def test_a_user_needs_ids_of_its_own_to_make_a_root_filesystem() -> None:
    assert bootstrap.missing(ALL.__contains__, True, True, is_root=False) == ["uidmap"]
    assert bootstrap.missing({*ALL, "newuidmap"}.__contains__, True, True, is_root=False) == []


def test_what_a_release_does_not_have_is_not_asked_of_it() -> None:
    wanted = ["docker.io", "docker-cli", "docker-buildx", "git"]
    ubuntu = {"docker-buildx": "Package: docker-buildx"}
    assert bootstrap.offered(wanted, lambda _: "") == ["docker.io", "git"], "Debian 12"
    assert bootstrap.offered(wanted, lambda command: ubuntu.get(command[-1], "")) == [
        "docker.io",
        "docker-buildx",
        "git",
    ]


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Docker: its apt-get notes what it is asked and makes what it installs."""
    commands, log = tmp_path / "bin", tmp_path / "apt.log"
    old = WITHOUT_BUILDX.replace("{version}", "20.10.24")
    body = f"""echo "$@" >>{log}
case " $* " in *" install "*)
    for name in docker dockerd mmdebstrap git keyring; do
        printf '%s\\n' '#!/bin/sh' '{old.replace("'", "")}' >{commands}/$name
        chmod +x {commands}/$name
    done
esac"""
    script(commands / "apt-get", body)
    for name in ("sh", "env", "chmod"):
        (commands / name).symlink_to(f"/bin/{name}")
    release = tmp_path / "os-release"
    release.write_text('NAME="x"\nID=mint\nID_LIKE="ubuntu debian"\n', encoding="utf-8")
    monkeypatch.setenv("PATH", str(commands))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(bootstrap, "_path", lambda: str(commands))
    monkeypatch.setattr(bootstrap, "SYSTEM_DOCKER", commands / "docker")
    monkeypatch.setattr(bootstrap, "KEYRING", commands / "keyring")
    monkeypatch.setattr(bootstrap, "OS_RELEASE", release)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return log


def test_a_bare_machine_is_set_up_once(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(bootstrap, "start", lambda: started.append("engine"))
    monkeypatch.setattr(bootstrap, "_answers", lambda: bool(started))
    monkeypatch.setattr(bootstrap, "client", lambda: None)
    bootstrap.ensure()
    assert [line.split()[2] for line in bare.read_text().splitlines()] == ["update", "install"]
    assert started == ["engine"]
    bootstrap.builder.cache_clear()
    bootstrap.ensure()
    assert len(bare.read_text().splitlines()) == 2, "a second run must install nothing"
    assert started == ["engine"], "a second run must start nothing"


def test_without_rights_the_packages_are_told(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        UserError, match="needs the packages mmdebstrap git: run `sudo apt-get install --yes mmdebstrap git`"
    ):
        bootstrap.install(["mmdebstrap", "git"])
    told = r"`sudo apt-get install --yes docker\.io && sudo usermod -aG docker \$USER`, then log in again"
    with pytest.raises(UserError, match=told):
        bootstrap.install(["docker.io", "docker-buildx"])
    assert not bare.exists()


def test_a_sudo_that_asks_for_nothing_is_used(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    script(bare.parent / "bin" / "sudo", 'shift; [ "$1" = true ] || exec "$@"')
    bootstrap.install(["git"])
    assert "install --no-install-recommends git" in bare.read_text()


def test_another_system_is_told_the_packages(bare: Path) -> None:
    bootstrap.OS_RELEASE.write_text("ID=fedora\n", encoding="utf-8")
    with pytest.raises(UserError, match="by the names of Debian's packages, git: install them"):
        bootstrap.install(["git"])
    assert not bare.exists()


def test_a_failing_apt_is_told_with_its_last_line(bare: Path) -> None:
    script(bare.parent / "bin" / "apt-get", 'echo "E: no such mirror" >&2; exit 100')
    with pytest.raises(
        UserError, match=r"apt-get update failed \(E: no such mirror\); this needs the packages git"
    ):
        bootstrap.install(["git"])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[list[str]]]:
    """No engine is really started; gives the commands that were run."""
    ran: list[list[str]] = []

    def fake_run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", fake_run)
    monkeypatch.setattr(bootstrap, "START_SECONDS", 0.1)
    monkeypatch.setattr(bootstrap, "SOCKET", tmp_path / "absent.sock")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return lambda: ran


def test_an_engine_that_does_not_come_up_is_told_with_its_log(
    quick: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bootstrap, "SYSTEMD", tmp_path / "absent")
    monkeypatch.setattr(bootstrap, "_answers", lambda: False)
    with pytest.raises(
        UserError, match=rf"did not answer within 0\.1 s of its start; why is in {bootstrap.LOG}"
    ):
        bootstrap.start()
    assert "setsid dockerd" in quick()[0][-1]


@pytest.mark.parametrize(
    ("systemd", "told"), [(True, "systemctl start docker"), (False, "service docker start")]
)
def test_how_to_start_the_engine_is_told_by_what_rules_the_machine(
    systemd: bool, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bootstrap, "SYSTEMD", tmp_path if systemd else tmp_path / "absent")
    line = bootstrap.explain(failure(FileNotFoundError(2, "no")), {}, has_engine=True)
    assert line.startswith(f"Docker Engine is not running: `sudo {told}`")


def test_where_systemd_rules_it_starts_the_engine(
    quick: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bootstrap, "SYSTEMD", tmp_path)
    monkeypatch.setattr(bootstrap, "_answers", lambda: True)
    bootstrap.start()
    assert quick() == [["systemctl", "start", "docker"]]
