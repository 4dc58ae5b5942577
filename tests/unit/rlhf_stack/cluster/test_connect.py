"""rlhf_stack.cluster.connect, with a Ray that takes the process's signals."""

import signal
import sys
from types import FrameType
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cluster.connect import connect, connected


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
