"""Errors of checkpoints that could not be written; tests/patches has a real one."""

import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from rlhf_stack.openrlhf import checkpoint_errors


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, torch = MagicMock(), MagicMock()
    ray.util.get_node_ip_address.return_value = "10.0.0.2"
    torch.distributed.get_rank.return_value = 3
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr("socket.gethostname", lambda: "node-b")


@checkpoint_errors.name_checkpoint_errors
def save(strategy: object, model: object, folder: str, error: Exception | None = None) -> tuple[object, ...]:
    if error is not None:
        raise error
    return strategy, model, folder


def test_successful_save_is_unchanged() -> None:
    assert save("strategy", "model", "folder") == ("strategy", "model", "folder")


@pytest.mark.parametrize("kind", [RuntimeError, OSError])
def test_rank_node_folder_and_free_space_are_named(tmp_path: Path, kind: type[Exception]) -> None:
    error = kind("unexpected pos 128 vs 0\n")
    with pytest.raises(checkpoint_errors.CheckpointError) as raised:
        save(None, None, str(tmp_path), error=error)
    expected = (
        rf"rank 3 on node node-b \(10\.0\.0\.2\): the checkpoint in {re.escape(str(tmp_path))} is incomplete"
        r", \d+\.\d of \d+\.\d GB are free there: unexpected pos 128 vs 0"
    )
    assert re.fullmatch(expected, str(raised.value))
    assert raised.value.__cause__ is error


def test_free_space_of_a_missing_folder_is_omitted(tmp_path: Path) -> None:
    with pytest.raises(checkpoint_errors.CheckpointError, match="none is incomplete: denied"):
        save(None, None, str(tmp_path / "none"), error=PermissionError("denied"))


def test_other_errors_are_unchanged(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not a model"):
        save(None, None, str(tmp_path), error=AssertionError("not a model"))
