"""Setting up Docker: what is installed and started, and the messages where that is not permitted."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.docker import bootstrap, client
from scripts.errors import UserError
from tests.unit.scripts.docker.test_client import script

OLD_DOCKER = 'case "$1" in --version) echo "Docker version 20.10.24, build x";; *) exit 1;; esac'


ALL = {"dockerd", "docker", "mmdebstrap", "git", "zstd"}
DOCKER = ["docker.io", "iptables"]
TOOLS = ["mmdebstrap", "git", "zstd"]


@pytest.mark.parametrize(
    ("there", "answers", "can_build", "wanted"),
    [
        (ALL, True, True, []),
        (ALL, False, True, []),
        (ALL, True, False, ["docker-buildx"]),
        (ALL - {"docker"}, True, False, ["docker.io", "docker-cli", "docker-buildx"]),
        (ALL - {"mmdebstrap"}, True, True, ["mmdebstrap"]),
        (ALL - {"dockerd"}, False, False, [*DOCKER, "docker-buildx"]),
        (set(), False, False, [*DOCKER, "docker-cli", "docker-buildx", *TOOLS]),
        ({"docker", "git"}, False, True, [*DOCKER, "mmdebstrap", "zstd"]),
    ],
)
def test_only_what_is_missing_is_installed(
    there: set[str], answers: bool, can_build: bool, wanted: list[str]
) -> None:
    assert bootstrap.missing_packages(there.__contains__, answers, can_build, is_root=True) == wanted


def test_a_user_without_root_needs_uidmap() -> None:
    assert bootstrap.missing_packages(ALL.__contains__, True, True, is_root=False) == ["uidmap"]
    assert bootstrap.missing_packages({*ALL, "newuidmap"}.__contains__, True, True, is_root=False) == []


def test_packages_that_a_release_does_not_have_are_omitted() -> None:
    wanted = ["docker.io", "docker-cli", "docker-buildx", "git"]
    ubuntu = {"docker-buildx": "Package: docker-buildx"}
    assert bootstrap.available(wanted, lambda _: "") == ["docker.io", "git"], "Debian 12"
    assert bootstrap.available(wanted, lambda command: ubuntu.get(command[-1], "")) == [
        "docker.io",
        "docker-buildx",
        "git",
    ]


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Docker: its apt-get logs its arguments and creates what it installs."""
    commands, log = tmp_path / "bin", tmp_path / "apt.log"
    body = f"""echo "$@" >>{log}
case " $* " in *" install "*)
    for name in docker dockerd mmdebstrap git zstd; do
        printf '%s\\n' '#!/bin/sh' '{OLD_DOCKER.replace("'", "")}' >{commands}/$name
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
    monkeypatch.setattr(client, "system_path", lambda: str(commands))
    monkeypatch.setattr(client, "SYSTEM_DOCKER", commands / "docker")
    monkeypatch.setattr(bootstrap, "OS_RELEASE", release)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return log


def test_a_bare_machine_is_set_up_once(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(bootstrap, "start", lambda: started.append("docker"))
    monkeypatch.setattr(bootstrap, "_answers", lambda: bool(started))
    monkeypatch.setattr(bootstrap, "connect", lambda: None)
    bootstrap.ensure(is_root=True)
    assert [line.split()[2] for line in bare.read_text().splitlines()] == ["update", "install"]
    assert started == ["docker"]
    client.docker_command.cache_clear()
    bootstrap.ensure(is_root=True)
    assert len(bare.read_text().splitlines()) == 2, "a second run must install nothing"
    assert started == ["docker"], "a second run must start nothing"


def test_without_root_the_error_names_the_packages(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(
        UserError, match="needs the packages mmdebstrap git: run `sudo apt-get install --yes mmdebstrap git`"
    ):
        bootstrap.install(["mmdebstrap", "git"])
    message = r"`sudo apt-get install --yes docker\.io && sudo usermod -aG docker \$USER`, then log in again"
    with pytest.raises(UserError, match=message):
        bootstrap.install(["docker.io", "docker-buildx"])
    assert not bare.exists()


def test_a_sudo_without_a_password_is_used(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    script(bare.parent / "bin" / "sudo", 'shift; [ "$1" = true ] || exec "$@"')
    bootstrap.install(["git"])
    assert "install --no-install-recommends git" in bare.read_text()


def test_on_another_system_the_error_names_the_packages(bare: Path) -> None:
    bootstrap.OS_RELEASE.write_text("ID=fedora\n", encoding="utf-8")
    with pytest.raises(
        UserError, match="this needs Debian's packages git, or their equivalents: install them"
    ):
        bootstrap.install(["git"])
    assert not bare.exists()


def test_the_error_of_a_failed_apt_quotes_its_last_line(bare: Path) -> None:
    script(bare.parent / "bin" / "apt-get", 'echo "E: no such mirror" >&2; exit 100')
    with pytest.raises(
        UserError, match=r"apt-get update failed \(E: no such mirror\); this needs the packages git"
    ):
        bootstrap.install(["git"])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[list[str]]]:
    """Nothing is really started; returns the commands that were run."""
    ran: list[list[str]] = []

    def fake_run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", fake_run)
    monkeypatch.setattr(bootstrap, "START_SECONDS", 0.1)
    monkeypatch.setattr(bootstrap, "SOCKET", tmp_path / "absent.sock")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return lambda: ran


def test_the_error_of_a_failed_start_names_the_log(
    quick: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bootstrap, "SYSTEMD", tmp_path / "absent")
    monkeypatch.setattr(bootstrap, "_answers", lambda: False)
    with pytest.raises(UserError, match=rf"did not answer within 0\.1 s of its start; see {bootstrap.LOG}"):
        bootstrap.start()
    assert "setsid dockerd" in quick()[0][-1]


def test_systemd_starts_docker_where_it_runs(
    quick: Callable[[], list[list[str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bootstrap, "SYSTEMD", tmp_path)
    monkeypatch.setattr(bootstrap, "_answers", lambda: True)
    bootstrap.start()
    assert quick() == [["systemctl", "start", "docker"]]
