"""Errors about lost actors; tests/cluster has nodes that really die."""

import sys
import threading
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cluster import actor_registry, gcs_kv

ENGINE = {"who": "engine 2", "actor": "abc", "job": "01", "host": "node-b", "address": "10.0.0.2"}


class RayError(Exception):
    """Replaces ray.exceptions.RayError."""


class Lost(RayError):
    """Replaces ray.exceptions.RayActorError."""

    def __init__(self, text: str, in_constructor: bool = False) -> None:
        super().__init__(text)
        self.actor_id, self.actor_init_failed = "abc", in_constructor


class Unavailable(Lost):
    """Replaces ray.exceptions.ActorUnavailableError."""


class InTask(RayError):
    """Replaces ray.exceptions.RayTaskError."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("a traceback")
        self.cause = cause


class Remote(actor_registry.PeerError):
    """Replaces Ray's version of a `PeerError` in a task, whose text is a traceback."""

    cause = actor_registry.PeerError("engine 2 is dead")


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    fake = MagicMock()
    fake.exceptions.RayError, fake.exceptions.RayActorError = RayError, Lost
    fake.exceptions.ActorUnavailableError, fake.exceptions.RayTaskError = Unavailable, InTask
    fake.get_runtime_context.return_value.get_job_id.return_value = "01"
    monkeypatch.setitem(sys.modules, "ray", fake)
    records = {"actor/": [ENGINE, ENGINE | {"job": "02"}], "actor/abc": [ENGINE], "01/engine 2 rank ": []}
    monkeypatch.setattr(gcs_kv, "list_records", records.__getitem__)
    return fake


def rank(number: int, host: str) -> dict[str, object]:
    return {"rank": number, "host": host}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([], "engine 2 on node node-b (10.0.0.2)"),
        ([rank(0, "node-b")], "engine 2 on node node-b (10.0.0.2) with its rank 0"),
        (
            [rank(10, "node-c"), rank(9, "node-b")],
            "engine 2 on node node-b (10.0.0.2) with its rank 9, rank 10 on node node-c",
        ),
    ],
)
def test_engine_is_described_with_its_ranks(ranks: list[dict[str, object]], expected: str) -> None:
    assert actor_registry.describe(ENGINE, ranks) == expected


def test_dead_actor_is_named_with_the_last_line_of_rays_reason() -> None:
    with (
        pytest.raises(actor_registry.PeerError) as raised,
        actor_registry.translate_actor_errors("loading w"),
    ):
        raise Lost("The actor died.\n\tpid: 7\nIts node has died.\n")
    assert str(raised.value) == "loading w: engine 2 on node node-b (10.0.0.2) is dead: Its node has died."
    assert isinstance(raised.value.__cause__, Lost)


def test_unavailable_actor_is_not_reported_as_dead() -> None:
    with (
        pytest.raises(actor_registry.PeerError, match="cannot be reached, and Ray cannot tell yet"),
        actor_registry.translate_actor_errors(),
    ):
        raise Unavailable("Socket closed")


def test_operation_is_prepended_to_an_error_from_another_process() -> None:
    with (
        pytest.raises(actor_registry.PeerError, match=r"^sync 3: engine 2 is dead$"),
        actor_registry.translate_actor_errors("sync 3"),
    ):
        raise Remote("a traceback")


def test_error_of_a_failed_constructor_is_unchanged() -> None:
    with pytest.raises(Lost, match="no memory"), actor_registry.translate_actor_errors():
        raise Lost("no memory", in_constructor=True)


def states(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """Ray has every actor in ``state``."""
    private = MagicMock()
    private.state.actors.return_value = {"State": state}
    monkeypatch.setitem(sys.modules, "ray._private", private)


def test_lost_actors_are_named_if_others_were_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    states(monkeypatch, "DEAD")
    cut_off = InTask(RuntimeError("pair.cc:553] Connection closed by peer [10.0.0.2]:7\nmore"))
    expected = r"^sync 3: engine 2 on node node-b \(10.0.0.2\) died, and others were cut off: pair.*7$"
    with (
        pytest.raises(actor_registry.PeerError, match=expected),
        actor_registry.translate_actor_errors("sync 3"),
    ):
        raise cut_off


@pytest.mark.parametrize(
    ("text", "state"), [("no such file", "DEAD"), ("Connection reset by peer", "ALIVE"), ("", "DEAD")]
)
def test_task_error_is_unchanged_if_no_actor_is_lost_or_cut_off(
    monkeypatch: pytest.MonkeyPatch, text: str, state: str
) -> None:
    states(monkeypatch, state)
    monkeypatch.setattr(actor_registry, "NOTICE_SECONDS", 0.0)
    with pytest.raises(InTask), actor_registry.translate_actor_errors():
        raise InTask(RuntimeError(text))


def test_other_errors_are_unchanged() -> None:
    with pytest.raises(ValueError, match="other"), actor_registry.translate_actor_errors("loading w"):
        raise ValueError("other")


def test_actor_id_is_reported_if_rays_head_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_kv, "list_records", MagicMock(side_effect=RayError("the head is gone")))
    assert "actor abc" in actor_registry.describe_lost_actor(Lost("died"))
    assert "the head is gone" in actor_registry.describe_lost_actor(Lost("died"))


def test_a_lookup_that_fails_does_not_replace_the_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gcs_kv, "list_records", MagicMock(side_effect=TimeoutError("the head is busy")))
    monkeypatch.setattr(actor_registry, "NOTICE_SECONDS", 0.0)
    cut_off = InTask(RuntimeError("Connection closed by peer"))
    with pytest.raises(InTask) as raised, actor_registry.translate_actor_errors("sync 3"):
        raise cut_off
    assert raised.value is cut_off
    assert "lost actors cannot be named" in caplog.text
    assert "actor abc" in actor_registry.describe_lost_actor(Lost("died"))


def test_lost_actors_are_named_after_the_head_was_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [RayError("the head is busy"), [ENGINE]]

    def list_records(_prefix: str) -> object:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    states(monkeypatch, "DEAD")
    monkeypatch.setattr(gcs_kv, "list_records", list_records)
    monkeypatch.setattr(actor_registry, "POLL_SECONDS", 0.0)
    with (
        pytest.raises(actor_registry.PeerError, match=r"engine 2 on node node-b \(10.0.0.2\) died"),
        actor_registry.translate_actor_errors(),
    ):
        raise InTask(RuntimeError("Connection closed by peer"))


def test_a_process_whose_reports_are_lost_goes_on_and_warns_once(
    ray: MagicMock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gcs_kv, "put_record", MagicMock(side_effect=TimeoutError("the head is busy")))
    monkeypatch.setattr(gcs_kv, "_warned", threading.Event())
    ray.util.get_node_ip_address.return_value = "10.0.0.2"
    ray.get_runtime_context.return_value.get_actor_id.return_value = "abc"
    for who in ("engine 2", "rank 3 of Critic"):
        actor_registry.register_actor(who)
    (warning,) = caplog.records
    assert "did not store 'actor/abc'" in warning.getMessage()
    assert "the head is busy" in warning.getMessage()


def test_only_actors_are_registered(ray: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    records: dict[str, dict[str, object]] = {}
    monkeypatch.setattr(gcs_kv, "put_record", records.__setitem__)
    monkeypatch.setattr("socket.gethostname", lambda: "node-b")
    ray.util.get_node_ip_address.return_value = "10.0.0.2"
    context = ray.get_runtime_context.return_value
    context.get_job_id.return_value, context.get_actor_id.return_value = "01", None
    actor_registry.register_actor("engine 2")
    assert records == {}
    context.get_actor_id.return_value = "abc"
    actor_registry.register_actor("engine 2")
    assert records == {"actor/abc": ENGINE}
    actor_registry.register_rank(Lost("any"), 3)
    assert records["actor/abc"]["who"] == "rank 3 of Lost"
