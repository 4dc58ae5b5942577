"""rlhf_stack.cluster.connect, with a Ray that takes the process's signals."""

import signal
import sys
from types import FrameType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cluster.connect import connect, connected
from rlhf_stack.errors import UserError


def test_sigterm_reaches_the_handler_of_this_process_during_and_after_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray installs its own handler when it connects and when it disconnects."""
    received: list[str] = []

    def own(_number: int, _frame: FrameType | None) -> None:
        received.append("own")

    def replace(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: received.append("Ray's"))

    ray = MagicMock()
    ray.init.side_effect = ray.shutdown.side_effect = replace
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x" * 40)
    before = signal.signal(signal.SIGTERM, own)
    try:
        with connected():
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        connect()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == ["own", "own", "own"]


@pytest.mark.parametrize("has_class", [True, False])
def test_a_head_that_does_not_answer_for_a_while_is_an_error_and_no_defect(
    has_class: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor waits for such a head; Ray's own error would end it."""
    error = type("RpcError", (Exception,), {})
    exceptions = SimpleNamespace(**({"RpcError": error} if has_class else {}), RayError=Exception)
    ray = MagicMock(exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x" * 40)
    expected = UserError if has_class else error
    with pytest.raises(expected, match="Deadline Exceeded"), connected():
        raise error("Deadline Exceeded\nstack")
    ray.shutdown.assert_called_once()
