"""From the events of a run to its report."""

import io
from typing import Any

import pytest
from rich.console import Console

from scripts.errors import UserError
from scripts.testing import demo_report

NODES = [
    {"address": "10.0.0.2", "host": "head", "gpus": 2.0},
    {"address": "10.0.0.3", "host": "worker", "gpus": 2.0},
]
RANKS = [{"rank": 0, "node": "10.0.0.3", "gpu": "0"}, {"rank": 1, "node": "10.0.0.3", "gpu": "1"}]


def events(**changes: Any) -> list[dict[str, Any]]:
    """A run of four steps and two syncs; ``changes`` hold for the last verification."""
    verify = {"event": "verify", "index": 1, "equal": True, "parameters": 27} | changes
    steps = [
        {"event": "step", "step": i + 1, "reward": reward} for i, reward in enumerate((0.1, 0.2, 0.6, 0.7))
    ]
    return [
        {"event": "engine", "engine": 0, "ranks": RANKS, "straddles": False},
        {"event": "sync", "index": 0, "backend": "gloo", "bytes": 100, "seconds": 0.5},
        {"event": "verify", "index": 0, "equal": True, "parameters": 27},
        *steps,
        {"event": "sync", "index": 1, "backend": "gloo", "bytes": 100, "seconds": 0.5},
        verify,
    ]


def build(run: list[dict[str, Any]]) -> dict[str, Any]:
    """The report of ``run``."""
    return demo_report.build("cell", {"ray": "2.55.0"}, NODES, run, {"total": 61.234})


def test_the_report_has_every_documented_key() -> None:
    made = build(events())
    assert made["nodes"][1] == {"address": "10.0.0.3", "host": "worker", "gpus": 2.0}
    assert made["engines"] == [{"node": "10.0.0.3", "gpus": ["0", "1"], "straddles": False}]
    assert (made["steps"], made["reward_first"], made["reward_last"]) == (4, 0.3, 0.5)
    assert made["seconds"] == {"total": 61.2}
    assert [sync["bytes"] for sync in made["syncs"]] == [100, 100]
    assert made["weights_equal"] is True


@pytest.mark.parametrize("changes", [{"equal": False}, {"index": 0}])
def test_weights_are_equal_only_if_the_last_sync_was_verified(changes: dict[str, Any]) -> None:
    """A mismatch, or a last sync that was not verified, is not equality."""
    assert build(events(**changes))["weights_equal"] is False


def test_an_earlier_mismatch_counts() -> None:
    """Later syncs send everything again and would hide it."""
    run = events()
    run[2]["equal"] = False
    assert build(run)["weights_equal"] is False


@pytest.mark.parametrize("kind", ["step", "engine", "sync"])
def test_the_error_of_an_incomplete_run_names_what_is_missing(kind: str) -> None:
    with pytest.raises(UserError, match=r"recorded no (training step|engine|weight sync)"):
        build([event for event in events() if event["event"] != kind])


def test_the_tables_name_nodes_and_straddling_engines() -> None:
    run = events()
    run[0] = {
        "event": "engine",
        "engine": 0,
        "ranks": [RANKS[0], RANKS[1] | {"node": "10.0.0.2"}],
        "straddles": True,
    }
    out = io.StringIO()
    demo_report.show(build(run), Console(file=out, width=120))
    assert out.getvalue().count("STRADDLES") == 2
    assert "10.0.0.2" in out.getvalue()
    assert "▂▂▅▆" in out.getvalue()


GOOD = {"steps": 28, "weights_equal": True, "reward_first": 0.25, "reward_last": 0.99}


@pytest.mark.parametrize(
    ("changes", "learns", "reason"),
    [
        ({}, True, ""),
        ({"steps": 27}, True, "27 of 28 training steps"),
        ({"weights_equal": False}, True, "the same weights"),
        ({"reward_last": 0.25}, True, "the reward rose by 0.00, from 0.25 to 0.25"),
        ({"reward_last": float("nan")}, True, "the reward rose by nan"),
        ({"reward_last": 0.25}, False, ""),
    ],
)
def test_a_run_without_its_steps_or_without_learning_is_no_proof(
    changes: dict[str, Any], learns: bool, reason: str
) -> None:
    """The demo passed with one step, and with a reward that stayed where it was."""
    found = demo_report.shortfall(GOOD | changes, 28, learns)
    assert (reason in found) if reason else not found
