"""The check of the known-bad rows: which requirements are resolved, and the state of a row by the result."""

import dataclasses
from unittest.mock import MagicMock

import pytest
from rlhf_stack import known_bad
from rlhf_stack.known_bad import probes

from scripts.errors import UserError
from scripts.locks import resolver
from scripts.matrix.load import find, load
from scripts.matrix.suites import SUITES
from scripts.testing import known_bad as session

ROWS = {row.id: row for row in known_bad.load()}
MATRIX = load()
UV = (
    "requirements cannot be resolved: Because there is no version of "
    "xgrammar{platform_machine == 'x86_64'}==0.1.16 and vllm==0.8.1 depends on it, it cannot be used."
)


@pytest.mark.parametrize(
    ("error", "state"), [(UV, "holds"), (None, "gone"), ("the package index cannot be reached", "unknown")]
)
def test_a_row_holds_only_if_the_resolver_reports_its_symptom(error: str | None, state: str) -> None:
    assert session.outcome(ROWS["xgrammar-0.1.16-gone"], error)[0] == state


def test_the_requirements_of_rows_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = []

    def answer(question: resolver.Question) -> str:
        resolved.append(question.requirements)
        raise UserError(UV)

    monkeypatch.setattr(resolver, "answer", answer)
    found = session.resolved(list(ROWS.values()), find(MATRIX, MATRIX.default))
    assert set(found) == {name for name, row in ROWS.items() if row.unsolvable}
    assert "openrlhf==0.7.0\nvllm==0.8.3\n" in resolved
    assert found["xgrammar-0.1.16-gone"][0] == "holds"
    assert found["openrlhf-0.7.0-vllm-0.8.3"][0] == "unknown"


def test_every_probe_belongs_to_a_row() -> None:
    assert set(probes.PROBES) <= set(ROWS)


@pytest.mark.parametrize(
    ("code", "holds"), [(ROWS["path-missing"].reproduce, True), ("print('well')", False)]
)
def test_the_code_of_a_row_must_fail_with_its_symptom(code: str, holds: bool) -> None:
    row = dataclasses.replace(ROWS["path-missing"], reproduce=code)
    assert bool(list(probes.code_fails(row))) == holds


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.reproduce], ids=lambda row: row.id)
def test_the_code_of_a_row_can_be_parsed(row: known_bad.Row) -> None:
    compile(row.reproduce, row.id, "exec")


@pytest.mark.parametrize(
    ("row", "versions", "about"),
    [
        ("ray-zero-resource-actors", {"ray": "2.9.3"}, True),
        ("ray-zero-resource-actors", {"ray": "2.12.0", "openrlhf": "0.5.1"}, False),
        ("ray-rocr-refused", {"ray": "2.55.0"}, True),
        ("vllm-c-renamed", {"vllm": "0.29.0"}, False),
    ],
    ids=["versions", "other versions", "ROCm without a card", "CUDA alone"],
)
def test_a_probe_runs_on_the_versions_of_its_row(
    row: str, versions: dict[str, str], about: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLHF_STACK_ACCELERATOR", raising=False)
    assert probes.is_about(ROWS[row], versions) == about


def test_the_probes_have_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    client, limits = MagicMock(), MagicMock()
    container = client.containers.create.return_value
    container.wait.return_value = {"StatusCode": 0}
    container.logs.return_value = b"{}"
    monkeypatch.setattr(session, "released", lambda _: [])
    monkeypatch.setattr(session, "killed_after", limits)
    assert session.probed(client, find(MATRIX, MATRIX.default), "an-image") == {}
    limits.assert_called_once_with(SUITES["known-bad"].hours, container, "the probes")
