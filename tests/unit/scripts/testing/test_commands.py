"""The words of ``python -m scripts test``: a suite, a cell, and arguments for pytest."""

import re
from typing import Any
from unittest.mock import MagicMock

import pytest
from typer.testing import CliRunner

from scripts.cli import app
from scripts.errors import UserError
from scripts.images.inputs import INPUTS
from scripts.locks import preflight
from scripts.matrix.load import load
from scripts.matrix.model import PLAIN_INDEX
from scripts.testing import commands, demo, in_image, older_image, on_host, plans

DEFAULT, OTHER = load().default, "ray2.9.3-vllm0.4.2-cpu"


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, list[str]]]:
    """The suites that would have run: cell, suite, arguments."""
    runs: list[tuple[str, str, list[str]]] = []

    def run_suite(client: Any, cell: Any, suite: str, arguments: list[str], again: bool) -> int:
        runs.append((cell.id, suite, [*arguments, *(["again"] if again else [])]))
        return 1

    monkeypatch.setattr(commands, "connect", MagicMock)
    monkeypatch.setattr(on_host, "run_suite", run_suite)
    monkeypatch.setattr(older_image, "warning", lambda *_: None)
    monkeypatch.setattr(preflight, "_finds", lambda *_, **__: False)
    return runs


@pytest.mark.parametrize(
    ("words", "cell", "arguments"),
    [
        ([], DEFAULT, []),
        ([OTHER], OTHER, []),
        (["-k", "this or that", "-rfE"], DEFAULT, ["-k", "this or that", "-rfE"]),
        ([OTHER, "--timeout=5", "-x"], OTHER, ["--timeout=5", "-x"]),
        ([OTHER, "--", "-k", "this"], OTHER, ["-k", "this"]),
        (["--again"], DEFAULT, ["again"]),
        ([OTHER, "--again", "-x"], OTHER, ["-x", "again"]),
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
        (["demo", "--steps", "0"], "--steps 0: expected a number from 1"),
    ],
)
def test_a_wrong_word_is_an_error(words: list[str], error: str, ran: list[Any]) -> None:
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith(error)
    assert ran == []


def test_without_torch_of_the_default_cell_the_two_commands_use_its_stand_in(
    monkeypatch: pytest.MonkeyPatch,
    ran: list[Any],
) -> None:
    """The stand-in from the plain index, which every machine can build; a cell that is named is used."""
    demos: list[str] = []
    planned = MagicMock(return_value=0)
    monkeypatch.setattr(demo, "run_demo", lambda cell, *_, **__: demos.append(cell.id))
    monkeypatch.setattr(plans, "run", planned)
    for words in (["demo"], ["demo", DEFAULT], ["suites", "--default"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert demos == [DEFAULT + PLAIN_INDEX, DEFAULT]
    plan, again = planned.call_args.args
    assert not again
    assert {job.cell for job in plan.jobs} == {DEFAULT + PLAIN_INDEX}
    assert plan.commands[-1][-1] == DEFAULT + PLAIN_INDEX


@pytest.mark.parametrize(
    ("layers", "inputs", "options", "error"),
    [
        (3, "a", [], "mine has more layers than .*, it was made FROM it: add --derived"),
        (3, "a", ["--derived"], None),
        (2, "a", [], None),
        (3, "b", [], None),
    ],
    ids=["made FROM it", "and said so", "pulled", "built from other inputs"],
)
def test_an_image_made_from_ours_is_not_tested_as_ours(
    layers: int, inputs: str, options: list[str], error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def image(count: int, label: str) -> Any:
        return MagicMock(labels={INPUTS: label}, attrs={"RootFS": {"Layers": ["sha256:0"] * count}})

    client, runs = MagicMock(), MagicMock(return_value=0)
    client.images.get.side_effect = lambda name: image(layers, inputs) if name == "mine" else image(2, "a")
    monkeypatch.setattr(commands, "connect", lambda: client)
    monkeypatch.setattr(commands, "sweep", MagicMock())
    monkeypatch.setattr(in_image, "run_all", runs)
    result = CliRunner().invoke(app, ["test", "cluster", DEFAULT, "--tag", "mine", *options])
    if error:
        assert isinstance(result.exception, UserError)
        assert re.fullmatch(error, str(result.exception))
    assert runs.called == (error is None)
