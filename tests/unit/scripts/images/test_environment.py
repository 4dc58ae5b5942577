"""What the entrypoint and login shells set and report: images/rootfs/usr/local/lib/rlhf-stack/environment."""

import shlex
import subprocess
from pathlib import Path

import msgspec
import pytest

from scripts.images.context import ACCELERATOR, IMAGES, write_environment
from scripts.matrix.load import Setting, expand, load
from scripts.matrix.model import Profile

SCRIPT = IMAGES / "rootfs" / "usr" / "local" / "lib" / "rlhf-stack" / "environment"
CELL = expand(load())[0]
IMAGE = {ACCELERATOR: CELL.accelerator.kind}
AWKWARD = 'it\'s $HOME "x" \\ = `y`'


def setting(name: str, value: str) -> Setting:
    """A setting whose reason contains its name."""
    return Setting(name=name, value=value, reason=f"reason of {name}", source="here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the image has in /etc/rlhf-stack, for two defaults and two profiles."""
    profiles = (
        Profile(name="nccl", reason="r", source="s", env=(setting("B", "2"), setting("C", AWKWARD))),
        Profile(name="other", reason="r", source="s", env=()),
    )
    accelerator = msgspec.structs.replace(CELL.accelerator, profiles=profiles)
    settings = (setting("A", AWKWARD), setting("B", "1"), setting("API_KEY", "none"))
    write_environment(msgspec.structs.replace(CELL, accelerator=accelerator, env=settings), tmp_path)
    return tmp_path


def sets(folder: Path, environment: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """What a shell with ``environment`` sets, as a shell reads it, and the lines that it prints to stderr."""
    done = subprocess.run(
        ["sh", "-eu", "-c", f'x=$({shlex.quote(str(SCRIPT))} "$1"); eval "$x"; env -0', "sh", str(folder)],
        env={"PATH": "/usr/bin:/bin"} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    after = dict(item.split("=", 1) for item in done.stdout.split("\0") if item)
    ignored = {"PATH", "PWD", "OLDPWD", "SHLVL", "_", "RLHF_STACK_TOLD", *environment}
    return {name: value for name, value in after.items() if name not in ignored}, done.stderr.splitlines()


def test_nothing_is_set_or_reported_with_the_defaults(folder: Path) -> None:
    """The container has no configuration of its own."""
    assert sets(folder, IMAGE | {"A": AWKWARD, "B": "1", "API_KEY": "none"}) == ({}, [])


def test_a_shell_without_the_image_s_environment_gets_the_defaults(folder: Path) -> None:
    """The shell is started by `env -i bash -l` or ssh; every value is literal."""
    assert sets(folder, {}) == (IMAGE | {"A": AWKWARD, "B": "1", "API_KEY": "none"}, [])


def test_a_user_s_own_value_wins_and_is_reported_with_the_default_and_its_reason(folder: Path) -> None:
    """One line a variable; a variable that the user unset is reported too."""
    assert sets(folder, IMAGE | {"B": "7\nand more", "API_KEY": "none"}) == (
        {},
        [
            f"rlhf-stack: A is not set (default {AWKWARD}: reason of A)",
            "rlhf-stack: B=7 ... (default 1: reason of B)",
        ],
    )


def test_a_secret_is_not_printed(folder: Path) -> None:
    """A secret is recognized by the name of the variable."""
    _, lines = sets(folder, IMAGE | {"A": AWKWARD, "B": "1", "API_KEY": "hidden"})
    assert lines == ["rlhf-stack: API_KEY has another value (default none: reason of API_KEY)"]


def test_a_shell_below_does_not_repeat_a_report(folder: Path) -> None:
    """A child shell reports only later changes."""
    script = f'x=$({shlex.quote(str(SCRIPT))} "$1"); eval "$x";'
    done = subprocess.run(
        ["sh", "-euc", f"{script} {script} export B=8; {script}", "sh", str(folder)],
        env=IMAGE | {"PATH": "/usr/bin:/bin", "A": AWKWARD, "B": "7", "API_KEY": "none"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split()[1] for line in done.stderr.splitlines()] == ["B=7", "B=8"]


def test_a_profile_is_set_over_the_defaults(folder: Path) -> None:
    """The profile's variables are exported, and not reported as the user's own."""
    image = IMAGE | {"A": AWKWARD, "API_KEY": "none", "RLHF_STACK_PROFILE": "nccl"}
    assert sets(folder, image) == ({"B": "2", "C": AWKWARD}, [])
    assert sets(folder, image | {"B": "2", "C": AWKWARD}) == ({}, [])


def test_a_user_s_own_value_wins_over_a_profile(folder: Path) -> None:
    """The user's value is reported."""
    image = IMAGE | {"A": AWKWARD, "API_KEY": "none", "RLHF_STACK_PROFILE": "nccl"}
    assert sets(folder, image | {"B": "7"}) == (
        {"C": AWKWARD},
        ["rlhf-stack: B=7 (profile nccl 2: reason of B)"],
    )


@pytest.mark.parametrize("name", ["ncc", "../env", "*", ".."])
def test_an_unknown_profile_is_an_error_that_lists_the_known(folder: Path, name: str) -> None:
    """The error is one line with an exit code."""
    done = subprocess.run(
        [SCRIPT, folder], env={"RLHF_STACK_PROFILE": name}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"error: RLHF_STACK_PROFILE={name}: this image has no such profile; known: nccl, other\n"
    )


def test_without_profiles_the_error_lists_none(tmp_path: Path) -> None:
    """The matrix has no profile for some accelerators."""
    write_environment(
        msgspec.structs.replace(CELL, accelerator=msgspec.structs.replace(CELL.accelerator, profiles=())),
        tmp_path,
    )
    environment = {"RLHF_STACK_PROFILE": "nccl"}
    done = subprocess.run([SCRIPT, tmp_path], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.split("; ")[1]) == (2, "known: none\n")


def test_every_cell_s_environment_is_read_back_as_the_matrix_has_it(tmp_path: Path) -> None:
    """Each cell is tested with every profile of its accelerator."""
    for cell in expand(load()):
        folder = tmp_path / cell.id
        write_environment(cell, folder)
        defaults = {item.name: item.value for item in cell.env} | {ACCELERATOR: cell.accelerator.kind}
        assert sets(folder, {}) == (defaults, [])
        for profile in cell.accelerator.profiles:
            found, lines = sets(folder, {"RLHF_STACK_PROFILE": profile.name})
            assert (found, lines) == (defaults | {item.name: item.value for item in profile.env}, [])
