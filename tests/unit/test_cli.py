"""rlhf_stack.cli: how a command is found, explained and ended."""

import argparse
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from rlhf_stack import commands
from rlhf_stack.cli import main
from rlhf_stack.commands import patches
from rlhf_stack.output import show_json
from rlhf_stack.problem import Problem

RUNTIME = Path(commands.__file__).parents[2]
HEAVY = ("torch", "ray", "vllm", "transformers", "rich")


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make the command `patches` end with ``error``."""

    def run(_: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(patches, "run", run)


def test_every_module_is_a_command_in_the_list() -> None:
    assert sorted(commands.NAMES) == sorted(module.name for module in pkgutil.iter_modules(commands.__path__))


@pytest.mark.parametrize("name", commands.NAMES)
def test_every_command_explains_itself_by_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert f"\n  rlhf-stack {name}" in told
    assert "--json" in told


def test_help_lists_every_command_with_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    for name in commands.NAMES:
        first = (commands.load(name).__doc__ or "").split("\n")[0]
        assert f"{name} {' '.join(first.split())}" in told


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, contextlib\nfrom rlhf_stack.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(RUNTIME)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_an_unknown_command_is_answered_by_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctr"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert all(name in told for name in commands.NAMES)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (Problem("no such file: x"), 2, "error: no such file: x\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_mistake_and_an_interrupt_are_one_line(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail(monkeypatch, error)
    assert main(["patches"]) == code
    assert capsys.readouterr().err == line


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    environment = os.environ | {"PYTHONPATH": str(RUNTIME)}
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_stack", "patches"],
        env=environment,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 141
    assert done.stderr == ""


def test_json_names_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    show_json("doctor", 1, findings=[])
    assert json.loads(capsys.readouterr().out) == {"schema": "rlhf-stack/doctor/1", "findings": []}
