"""The command rlhf-stack is on the path, and imports only what it needs."""

import json
import subprocess
import sys

import pytest


def test_the_command_is_on_the_path() -> None:
    """The command runs and lists its commands."""
    done = subprocess.run(["rlhf-stack", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "patches" in done.stdout


@pytest.mark.parametrize("command", ["--help", "patches"])
def test_a_command_imports_only_what_it_needs(command: str) -> None:
    """Packages that take seconds to import are not imported without need."""
    code = (
        "import contextlib, sys; from rlhf_stack.cli.main import main\n"
        f"with contextlib.suppress(SystemExit): main(['{command}'])\n"
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_json_names_its_schema() -> None:
    """The output of one command stands for all."""
    done = subprocess.run(["rlhf-stack", "patches", "--json"], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["schema"] == "rlhf-stack/patches/1"
    assert result["patches"]
