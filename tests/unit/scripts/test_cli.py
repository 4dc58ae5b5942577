"""The host's command: exit codes, and errors in one line."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from scripts import cli
from scripts.errors import UserError
from scripts.matrix.load import load
from scripts.paths import ROOT

BASE_PYTHON = str(Path(sys.base_prefix, "bin", "python3"))


def scripts(*arguments: str, python: tuple[str, ...] = (sys.executable,)) -> subprocess.CompletedProcess[str]:
    command = [*python, "-m", "scripts", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_wrong_cell_is_one_line_with_the_nearest() -> None:
    done = scripts("test", "image", "ray2.55.0-vllm0.29-cpu")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"did you mean {load().default!r}" in done.stderr


def test_with_another_python_one_line_names_the_command_to_run() -> None:
    done = scripts("lint", python=(BASE_PYTHON, "-S"))
    assert done.returncode == 1
    assert done.stderr == (
        "error: this Python is not the project's: run `bash scripts/nox.sh --version` once, "
        "then use .nox/host/bin/python\n"
    )


@pytest.fixture
def _fake_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that end in each way, in the place of ours."""
    made = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, result_callback=cli._exit)
    group = typer.Typer()

    @made.command()
    def nothing() -> None:
        pass

    @group.command()
    def code() -> int:
        return 3

    @made.command()
    def wrong() -> None:
        raise UserError("wrong")

    @made.command()
    def interrupted() -> None:
        raise KeyboardInterrupt

    made.add_typer(group, name="group")
    monkeypatch.setattr(cli, "app", made)


@pytest.mark.usefixtures("_fake_commands")
@pytest.mark.parametrize(("words", "code"), [(["nothing"], 0), (["group", "code"], 3), (["absent"], 2)])
def test_the_exit_code_is_that_of_the_command(
    words: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code


@pytest.mark.usefixtures("_fake_commands")
@pytest.mark.parametrize(("word", "error"), [("wrong", UserError), ("interrupted", KeyboardInterrupt)])
def test_errors_of_the_user_and_interrupts_are_raised(
    word: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`errors.run` prints both as one line."""
    monkeypatch.setattr(sys, "argv", ["scripts", word])
    with pytest.raises(error):
        cli.main()
