"""The host's command: exit codes, and errors in one line."""

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from scripts import cli, errors
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
@pytest.mark.parametrize(("words", "code"), [(["nothing"], 0), (["group", "code"], 3)])
def test_the_exit_code_is_that_of_the_command(
    words: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code


@pytest.mark.usefixtures("_fake_commands")
def test_no_variable_selects_tests_of_which_a_record_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial run was recorded as a passed suite."""
    for name in cli.PYTEST_VARIABLES:
        monkeypatch.setenv(name, "-k nothing")
    monkeypatch.setattr(sys, "argv", ["scripts", "nothing"])
    with pytest.raises(SystemExit):
        cli.main()
    assert not set(cli.PYTEST_VARIABLES) & set(os.environ)


@pytest.mark.usefixtures("_fake_commands")
@pytest.mark.parametrize(
    ("word", "error"), [("wrong", UserError), ("absent", UserError), ("interrupted", KeyboardInterrupt)]
)
def test_errors_of_the_user_and_interrupts_are_raised(
    word: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`errors.run` prints both as one line."""
    monkeypatch.setattr(sys, "argv", ["scripts", word])
    with pytest.raises(error):
        cli.main()


def refusal(words: list[str]) -> str:
    """The error of a command line, which must be one line with exit code 2."""
    output, error = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["scripts", *words]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(error),
            pytest.raises(SystemExit) as ended,
        ):
            errors.run(cli.main)
    finally:
        sys.argv = before
        for number, handler in handlers.items():
            signal.signal(number, handler)
    shown = f"{words}: {ended.value.code}, {output.getvalue()[:300]!r}, {error.getvalue()[:300]!r}"
    assert ended.value.code == 2, shown
    assert output.getvalue() == "", shown
    assert error.getvalue().startswith("error: "), shown
    assert error.getvalue().count("\n") == 1, shown
    assert len(error.getvalue()) < 2000, shown
    return error.getvalue()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "error: Missing command (see python -m scripts --help)"),
        (["matrix"], "error: Missing command (see python -m scripts matrix --help)"),
        (["suites", "image:"], "'image:': no cell after the colon"),
        (["hip", "--minutes", "inf"], "Input should be less than or equal to 1440"),
        (["hip", "--check", "--offline"], "--check and --offline exclude each other"),
        (["nosuch"], "No such command 'nosuch'"),
        (["lock", "--nosuch"], "No such option"),
        (["build", ""], "no cell ''"),
        (["roots", ""], "''"),
        (["known-bad", ""], "no cell ''"),
        (["test", "image", "", "--tag", "x"], "no cell ''"),
        (["test", "image", "--tag", ""], "--tag"),
        (["demo", load().default, "--timeout", "nan"], "--timeout nan: expected a number from 1"),
        (["demo", load().default, "--timeout", "inf"], "--timeout inf"),
        (["demo", load().default, "--steps", "0"], "--steps 0"),
        (["demo", load().default, "--seed", "-1"], "--seed -1"),
        (["demo", load().default, "--layout", "round"], "--layout 'round'"),
        (["demo", load().default, "--steps", "two"], "'--steps'"),
        (["publish", ""], "expected REGISTRY/REPO"),
        (["matrix", "show", "x" * 5000], "no cell 'x"),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_bad_input_is_one_line(words: list[str], expected: str) -> None:
    assert expected in refusal(words)


def test_a_suggestion_is_near() -> None:
    assert "did you mean" not in refusal(["matrix", "show", "frobnicate"])
    assert f"did you mean {load().default!r}" in refusal(["matrix", "show", load().default + "x"])


WITH_CELL = [["build"], ["demo"], ["known-bad"], ["matrix", "show"], ["test", "image"], ["lock"], ["roots"]]
WITH_CELL += [["publish", "registry.local/x", "--cell"]]
# Hypothesis also draws constants of the sources, such as names of commands and cells; none has this ending.
NAMES = st.just("") | st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(
    lambda text: not text.startswith("-")
).map("{}!".format)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(WITH_CELL), NAMES)
def test_no_name_of_a_cell_is_taken_or_ends_with_a_traceback(command: list[str], name: str) -> None:
    refusal([*command, name])


# Each is refused with any further word: it is no such suite, file, number, action or argument.
WITH_WORD = [["suites"], ["test"], ["kernels", load().default], ["certificates"], ["certificates", "add"]]
WITH_WORD += [["gpu-kit", "--out", "/", *option] for option in (["--piece"], ["--architecture"], ["--wheel"])]
WITH_WORD += [["patches"], ["docker"], ["matrix"], ["catalogue"], ["fault-table"], ["soaks"], ["lint"]]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(WITH_WORD), NAMES)
def test_no_other_command_takes_any_word_or_ends_with_a_traceback(command: list[str], word: str) -> None:
    refusal([*command, word])


@pytest.mark.parametrize("redirect", [">/dev/full", ">&-"])
def test_an_output_that_cannot_be_written_is_one_line(redirect: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f'"$0" -m scripts matrix list {redirect}', sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")


def test_a_hang_up_that_the_caller_ignores_ends_nothing() -> None:
    """As under `nohup`, whose terminal is closed."""
    program = (
        "import os, signal; from scripts import errors; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        "errors.run(lambda: os.kill(os.getpid(), signal.SIGHUP) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
