"""The cell's env defaults apply however a process starts; a user's own value wins and is reported."""

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
    """Return the variables that the image sets, by name."""
    settings = {item["name"]: item["value"] for item in cell["env"]}
    return settings | {"RLHF_STACK_ACCELERATOR": cell["accelerator"]["kind"]}


@pytest.fixture
def environment(defaults: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process of the image, independent of that of these tests."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RLHF_STACK_")}
    return inherited | defaults


def run(command: list[str], environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run a process with exactly this environment."""
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def printed_environment(command: list[str], environment: dict[str, str]) -> dict[str, str]:
    """Return the environment that ``command`` prints like `PRINT`, with no other output."""
    done = run(command, environment)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(item.split("=", 1) for item in done.stdout.split("\0") if item)


def test_defaults_apply(defaults: dict[str, str]) -> None:
    """A process that our entrypoint did not start has the defaults."""
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
def test_defaults_reach_processes_of_every_shell(
    command: list[str], environment: dict[str, str], defaults: dict[str, str]
) -> None:
    """The defaults apply with and without the entrypoint."""
    for whole in ([ENTRYPOINT, *command], command):
        assert defaults.items() <= printed_environment(whole, environment).items()


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_a_login_shell_restores_them(shell: str, defaults: dict[str, str]) -> None:
    """A login shell restores them after `env -i` or ssh; other shells read no file that could."""
    assert defaults.items() <= printed_environment([f"/bin/{shell}", "-lc", "env -0"], {}).items()
    assert not defaults.keys() & printed_environment([f"/bin/{shell}", "-c", "/usr/bin/env -0"], {}).keys()


def test_a_login_shell_finds_the_stack() -> None:
    """KubeRay before 1.4 runs `bash -lc`, and Debian's profile resets PATH."""
    assert run(["bash", "-lc", "command -v ray"], dict(os.environ)).stdout == "/opt/venv/bin/ray\n"


def test_entrypoint_becomes_the_command(environment: dict[str, str]) -> None:
    """The same process, arguments and exit code, without output of its own."""
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
def test_a_user_s_own_value_wins_and_is_reported(
    command: list[str], cell: dict[str, Any], environment: dict[str, str]
) -> None:
    """One line each on stderr names the default and its reason."""
    settings = [item for item in cell["env"] if "TOKEN_" not in f"{item['name']}_"]
    done = run(command, environment | {item["name"]: OWN for item in settings})
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"rlhf-stack: {item['name']}={OWN} (default {item['value']}: {' '.join(item['reason'].split())})"
        for item in settings
    ]
    name = settings[0]["name"]
    value = run([ENTRYPOINT, "printenv", name], environment | {name: OWN})
    assert value.stdout == f"{OWN}\n"


def test_it_is_reported_once(cell: dict[str, Any], environment: dict[str, str]) -> None:
    """The login shell that the entrypoint starts does not repeat it."""
    done = run([ENTRYPOINT, "bash", "-lc", "true"], environment | {cell["env"][0]["name"]: OWN})
    assert len(done.stderr.splitlines()) == 1


def test_each_profile_sets_its_variables(cell: dict[str, Any], environment: dict[str, str]) -> None:
    """A profile applies in the entrypoint and in a login shell; the user's own value wins and is reported."""
    profiles = cell["accelerator"]["profiles"]
    if not profiles:
        pytest.skip("the matrix has no profile for this accelerator")
    for profile in profiles:
        expected = {item["name"]: item["value"] for item in profile["env"]}
        selected = environment | {PROFILE: profile["name"]}
        assert expected.items() <= printed_environment([ENTRYPOINT, *PRINT], selected).items()
        assert expected.items() <= printed_environment(["bash", "-lc", "env -0"], selected).items()
        first = profile["env"][0]["name"]
        done = run([ENTRYPOINT, "printenv", first], selected | {first: OWN})
        assert done.stdout == f"{OWN}\n"
        assert done.stderr.startswith(
            f"rlhf-stack: {first}={OWN} (profile {profile['name']} {expected[first]}: "
        )


@pytest.mark.parametrize(
    "command", [[ENTRYPOINT, "true"], ["bash", "-lc", "true"]], ids=["entrypoint", "bash"]
)
def test_an_unknown_profile_is_an_error(
    command: list[str], cell: dict[str, Any], environment: dict[str, str]
) -> None:
    """The error lists the known profiles, and the command does not start."""
    known = ", ".join(sorted(profile["name"] for profile in cell["accelerator"]["profiles"])) or "none"
    done = run(command, environment | {PROFILE: "no-such"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {PROFILE}=no-such: this image has no such profile; known: {known}\n"
