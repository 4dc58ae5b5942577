"""The cluster under the ladder: when a rung may use its GPUs."""

from contextlib import nullcontext
from itertools import chain, repeat
from unittest.mock import MagicMock

import pytest
from rlhf_stack.certify import on_cluster
from rlhf_stack.certify.ladder import NotClimbedError, Place
from rlhf_stack.cleanup import process_table
from rlhf_stack.errors import UserError
from rlhf_stack.placement import FreeNode

PLACE = Place("", "/nowhere", small=False)
HEAD = FreeNode("10.0.0.1", 0.0, 4.0, 0.0)
BUSY, FREE = (FreeNode("10.0.0.2", gpus, 4.0, 2.0) for gpus in (1.0, 2.0))


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cluster, "connected", lambda *_, **__: nullcontext())
    monkeypatch.setattr(on_cluster, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(on_cluster, "RELEASE_SECONDS", 0.05)


def test_a_cluster_that_refuses_us_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the GPUs of this machine: its token may be in another user's home."""
    refuse = MagicMock(side_effect=UserError("the token is wrong"))
    monkeypatch.setattr(on_cluster, "connected", refuse)
    monkeypatch.setattr(on_cluster, "_own", lambda _: nullcontext("our own"))
    monkeypatch.setattr(process_table, "gcs_address", lambda _: "10.0.0.2:6379")
    with pytest.raises(UserError, match="the token is wrong"), on_cluster.cluster("auto", [], []):
        pass
    monkeypatch.setattr(process_table, "gcs_address", lambda _: None)
    with on_cluster.cluster("auto", [], []) as found:
        assert found == "our own"


def test_a_rung_waits_for_the_gpus_of_processes_that_have_just_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = chain([[HEAD, BUSY], [HEAD, BUSY]], repeat([HEAD, FREE]))
    monkeypatch.setattr(on_cluster, "free_nodes", lambda: next(tables))
    monkeypatch.setattr(on_cluster, "RELEASE_SECONDS", 60.0)
    with on_cluster.nodes_with_gpus(PLACE) as found:
        assert found == [FREE]


def test_a_rung_is_not_climbed_while_something_else_uses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cluster, "free_nodes", lambda: [HEAD, BUSY])
    with (
        pytest.raises(NotClimbedError, match=r"GPUs are in use on 10\.0\.0\.2: stop what runs there"),
        on_cluster.nodes_with_gpus(PLACE),
    ):
        pass


def test_a_rung_needs_a_node_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cluster, "free_nodes", lambda: [HEAD])
    with pytest.raises(NotClimbedError, match="no node"), on_cluster.nodes_with_gpus(PLACE):
        pass
