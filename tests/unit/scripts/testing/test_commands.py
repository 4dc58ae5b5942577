"""The words of ``python -m scripts test``: a suite, a cell, and arguments for pytest."""

from typing import Any

import pytest
from typer.testing import CliRunner

from scripts.cli import app
from scripts.errors import UserError
from scripts.matrix.load import load
from scripts.testing import commands, on_host

DEFAULT, OTHER = load().default, "ray2.9.3-vllm0.4.2-cpu"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, list[str]]]:
    """The suites that would have run: cell, suite, arguments."""
    runs: list[tuple[str, str, list[str]]] = []

    def run_suite(client: Any, cell: Any, suite: str, arguments: list[str]) -> int:  # noqa: ARG001
        runs.append((cell.id, suite, arguments))
        return 1

    monkeypatch.setattr(commands, "connect", lambda: None)
    monkeypatch.setattr(on_host, "run_suite", run_suite)
    return runs


@pytest.mark.parametrize(
    ("words", "cell", "arguments"),
    [
        ([], DEFAULT, []),
        ([OTHER], OTHER, []),
        (["-k", "this or that", "-rfE"], DEFAULT, ["-k", "this or that", "-rfE"]),
        ([OTHER, "--timeout=5", "-x"], OTHER, ["--timeout=5", "-x"]),
        ([OTHER, "--", "-k", "this"], OTHER, ["-k", "this"]),
    ],
)
def test_words_are_a_cell_and_arguments_for_pytest(
    words: list[str], cell: str, arguments: list[str], ran: list[tuple[str, str, list[str]]]
) -> None:
    assert CliRunner().invoke(app, ["test", "network", *words]).exit_code == 1
    assert ran == [(cell, "network", arguments)]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["test", "netwrok"], "no test suite 'netwrok': choose from image, layers"),
        (["test", "network", "--tag", "x"], "--tag and --derived are for suites inside the image"),
        (["suites"], "expected SUITE:CELL... or one of"),
        (["suites", "--ci", "--release"], "expected SUITE:CELL... or one of"),
        (["demo", "--steps", "0"], "--steps 0: expected at least 1"),
    ],
)
def test_a_wrong_word_is_an_error(words: list[str], error: str, ran: list[Any]) -> None:
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith(error)
    assert ran == []
