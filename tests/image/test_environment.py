"""The defaults of the cell are in force, whatever starts a process; the user's own value wins and is told."""

import os
import subprocess
from typing import Any

import pytest

ENTRYPOINT = "/usr/local/bin/rlhf-entrypoint"
PROFILE = "RLHF_STACK_PROFILE"
OWN = "set by the user"
PRINT = ["env", "-0"]


@pytest.fixture
def defaults(cell: dict[str, Any]) -> dict[str, str]:
    """What the image sets, by name."""
    settings = {item["name"]: item["value"] for item in cell["env"]}
    return settings | {"RLHF_STACK_ACCELERATOR": cell["accelerator"]["kind"]}


@pytest.fixture
def environment(defaults: dict[str, str]) -> dict[str, str]:
    """What a process of the image begins with, whatever these tests were started with."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RLHF_STACK_")}
    return inherited | defaults


def run(command: list[str], environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """A process with exactly this environment."""
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def seen(command: list[str], environment: dict[str, str]) -> dict[str, str]:
    """The environment that ``command`` prints by `PRINT`; it says nothing else."""
    done = run(command, environment)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(item.split("=", 1) for item in done.stdout.split("\0") if item)


def test_defaults_are_in_force(defaults: dict[str, str]) -> None:
    """In a process that no shell of ours started."""
    assert {name: os.environ.get(name) for name in defaults} == defaults


@pytest.mark.parametrize(
    "command",
    [
        PRINT,
        ["sh", "-c", "env -0"],
        ["bash", "-c", "env -0"],
        ["bash", "-lc", "env -0"],
        ["sh", "-lc", "env -0"],
    ],
    ids=" ".join,
)
def test_they_reach_what_every_shell_starts(
    command: list[str], environment: dict[str, str], defaults: dict[str, str]
) -> None:
    """Through the entrypoint, and without it."""
    for whole in ([ENTRYPOINT, *command], command):
        assert defaults.items() <= seen(whole, environment).items()


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_a_login_shell_restores_them(shell: str, defaults: dict[str, str]) -> None:
    """Where nothing was inherited, as by `env -i` and ssh. Any other shell has nothing to know them from."""
    assert defaults.items() <= seen([f"/bin/{shell}", "-lc", "env -0"], {}).items()
    assert not defaults.keys() & seen([f"/bin/{shell}", "-c", "/usr/bin/env -0"], {}).keys()


def test_a_login_shell_finds_the_stack() -> None:
    """KubeRay starts `bash -lc`, and Debian's profile sets PATH anew."""
    assert run(["bash", "-lc", "command -v ray"], dict(os.environ)).stdout == "/opt/venv/bin/ray\n"


def test_entrypoint_becomes_the_command(environment: dict[str, str]) -> None:
    """The same process, the same arguments and exit code, and not a word of its own."""
    with subprocess.Popen(
        [ENTRYPOINT, "sh", "-c", 'echo $$ "$@"; exit 7', "sh", "a b", "*"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == (f"{process.pid} a b *\n", "", 7)


@pytest.mark.parametrize(
    "command", [[ENTRYPOINT, "true"], ["bash", "-lc", "true"]], ids=["entrypoint", "bash"]
)
def test_a_user_s_own_value_is_told_and_kept(
    command: list[str], cell: dict[str, Any], environment: dict[str, str]
) -> None:
    """One line on stderr for each, with the default and its reason."""
    settings = [item for item in cell["env"] if "TOKEN_" not in f"{item['name']}_"]
    done = run(command, environment | {item["name"]: OWN for item in settings})
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"rlhf-stack: {item['name']}={OWN} (default {item['value']}: {' '.join(item['reason'].split())})"
        for item in settings
    ]
    name = settings[0]["name"]
    kept = run([ENTRYPOINT, "printenv", name], environment | {name: OWN})
    assert kept.stdout == f"{OWN}\n"


def test_it_is_told_once(cell: dict[str, Any], environment: dict[str, str]) -> None:
    """Not again by the login shell that the entrypoint starts."""
    done = run([ENTRYPOINT, "bash", "-lc", "true"], environment | {cell["env"][0]["name"]: OWN})
    assert len(done.stderr.splitlines()) == 1


def test_each_profile_sets_its_variables(cell: dict[str, Any], environment: dict[str, str]) -> None:
    """By the entrypoint and in a login shell; the user's own value wins and is told."""
    profiles = cell["accelerator"]["profiles"]
    if not profiles:
        pytest.skip("the matrix has no profile for this accelerator")
    for profile in profiles:
        wanted = {item["name"]: item["value"] for item in profile["env"]}
        asked = environment | {PROFILE: profile["name"]}
        assert wanted.items() <= seen([ENTRYPOINT, *PRINT], asked).items()
        assert wanted.items() <= seen(["bash", "-lc", "env -0"], asked).items()
        first = profile["env"][0]["name"]
        done = run([ENTRYPOINT, "printenv", first], asked | {first: OWN})
        assert done.stdout == f"{OWN}\n"
        assert done.stderr.startswith(
            f"rlhf-stack: {first}={OWN} (profile {profile['name']} {wanted[first]}: "
        )


@pytest.mark.parametrize(
    "command", [[ENTRYPOINT, "true"], ["bash", "-lc", "true"]], ids=["entrypoint", "bash"]
)
def test_an_unknown_profile_is_an_error(
    command: list[str], cell: dict[str, Any], environment: dict[str, str]
) -> None:
    """Which lists the known ones; the command is not started."""
    known = ", ".join(sorted(profile["name"] for profile in cell["accelerator"]["profiles"])) or "none"
    done = run(command, environment | {PROFILE: "no-such"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {PROFILE}=no-such: this image has no such profile; known: {known}\n"
