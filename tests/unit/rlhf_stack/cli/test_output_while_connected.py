"""The standard output of commands while Ray prints to it, as its listener for errors does in a thread."""

import json
import sys
import threading
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cleanup import process_table
from rlhf_stack.cli.commands import top
from rlhf_stack.cli.main import main
from rlhf_stack.cluster import auth_token, connect, readiness, run_metrics
from rlhf_stack.diagnostics.doctor import cluster, comparison
from rlhf_stack.recovery import preemption
from rlhf_stack.recovery.preemption import Answer

LINE = "(raylet) The node with node id: 1 has been marked dead"
NODE = {
    "NodeManagerAddress": "10.0.0.2",
    "NodeManagerHostname": "h",
    "MetricsExportPort": 1,
    "NodeID": "1",
    "Alive": False,
    "Resources": {},
}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A Ray with one dead node that prints `LINE` when it connects, is asked for nodes, and disconnects."""

    def prints(result: Any = None) -> Any:
        def print_line(**_: Any) -> Any:
            listener = threading.Thread(target=lambda: print(LINE))  # the sys.stdout of this moment
            listener.start()
            listener.join()
            return result

        return print_line

    fake = MagicMock()
    fake.init.side_effect = fake.shutdown.side_effect = prints()
    fake.nodes.side_effect = prints([NODE])
    fake.wait.return_value = [], []
    fake.util.placement_group_table.return_value = {}
    for name in ("ray", "ray.util", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.setattr(auth_token, "is_supported", lambda: False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x" * 40)
    monkeypatch.setattr(connect, "wait_for_port", lambda *_: None)
    monkeypatch.setattr(process_table, "snapshot", lambda *_: [])
    monkeypatch.setattr(run_metrics, "published", list)
    monkeypatch.setattr(process_table, "gcs_address", lambda _: "10.0.0.2:6379")
    return fake


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The standard output of a command, during which Ray printed to the standard error."""
    main(words)
    output = capsys.readouterr()
    assert output.err.count(LINE) >= 2
    assert LINE not in output.out
    return output.out


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize(
    ("words", "schema"),
    [
        (["doctor", "--json"], "doctor"),
        (["top", "--json"], "top"),
        (["checkpoint", "--json"], "checkpoint"),
    ],
)
def test_the_json_of_a_command_is_all_of_its_standard_output(
    words: list[str], schema: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "_end_times", lambda _: {})
    monkeypatch.setattr(comparison, "compare_nodes", lambda _: [])
    monkeypatch.setattr(preemption, "request", lambda _: [Answer("01", True, True, 4, 1.0, "")])
    assert json.loads(printed(words, capsys))["schema"] == f"rlhf-stack/{schema}/1"


@pytest.mark.usefixtures("ray")
def test_the_json_of_an_error_after_a_connection_is_all_of_the_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preemption, "request", lambda _: [])
    assert json.loads(printed(["checkpoint", "--json"], capsys))["schema"] == "rlhf-stack/error/1"


@pytest.mark.usefixtures("ray")
def test_the_state_of_a_run_is_not_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(["top", "--once"], capsys).startswith("phase ?")


def test_the_refreshed_state_is_on_the_standard_output(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "PAUSE_SECONDS", 0)
    ray.util.placement_group_table.side_effect = [{}, KeyboardInterrupt]
    assert printed(["top"], capsys).startswith("phase ?")


@pytest.mark.usefixtures("ray")
def test_the_wait_for_nodes_leaves_the_standard_output_to_its_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readiness, "_answers", lambda _: "")
    monkeypatch.setattr(sys, "argv", ["readiness", "--nodes", "0", "--gpus", "0"])
    assert readiness.main() == 0
    output = capsys.readouterr()
    assert json.loads(output.out) == []
    assert output.err.count(LINE) >= 2
