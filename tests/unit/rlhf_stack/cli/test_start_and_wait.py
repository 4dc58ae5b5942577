"""rlhf_stack.cli.commands.start: what it prints when Ray or the nodes fail, or when it is interrupted."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cli.commands import start
from rlhf_stack.cli.main import main
from rlhf_stack.cluster import auth_token, readiness
from rlhf_stack.cluster.host import require_free_port
from rlhf_stack.config import env_vars

WORDS = ["start", "--head", "--auth", "none", "--node-ip-address", "127.0.0.1", "--json"]


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restore the handlers, which the command replaces."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Put a `ray` on the PATH that ends at once, with the code that the fixture is called with.

    The port of the job server is free, also if a Ray runs on this machine.
    """
    monkeypatch.setattr(start, "require_free_port", lambda *_: None)

    def put(code: int) -> None:
        file = tmp_path / "ray"
        file.write_text(f"#!/bin/sh\nexit {code}\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return put


@pytest.fixture
def _late_node(ray: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ray start, and one of two nodes not join it."""
    late = MagicMock(side_effect=readiness.NotReadyError("1 of 2 nodes joined"))
    ray(0)
    monkeypatch.setattr(readiness, "wait_for_nodes", late)


def require_error(code: int, message: str, printed: tuple[str, str]) -> None:
    """The output is one JSON object, and standard error one line."""
    output, errors = printed
    assert json.loads(output) == {"schema": "rlhf-stack/error/1", "error": message, "code": code}
    assert errors.splitlines()[-1].removeprefix("error: ") == message


def test_ray_that_does_not_start_is_an_error_as_json(
    ray: Callable[[int], None], capfd: pytest.CaptureFixture[str]
) -> None:
    ray(3)
    assert main(WORDS) == 1
    require_error(1, "ray start ended with code 3", capfd.readouterr())


def test_a_head_is_not_started_where_another_one_has_the_job_server(
    ray: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray ran without one, readiness queried the other cluster's, and `submit` would have used it."""
    ray(0)
    monkeypatch.setattr(start, "require_free_port", require_free_port)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(readiness, "DASHBOARD_PORT", port)
        assert main([*WORDS, "--port", "6380"]) == 2
        printed = capfd.readouterr()
        assert (
            f"error: port {port} of 127.0.0.1, for Ray's dashboard and job server, is in use" in printed.err
        )
        assert main([*WORDS, "--port", "6380", "--dry-run"]) == 0, "which needs no port"
    assert main([*WORDS, "--port", "6380"]) == 0


@pytest.mark.usefixtures("_late_node")
def test_nodes_that_do_not_join_are_an_error_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--expect-nodes", "2"]) == 1
    expected = (
        "1 of 2 nodes joined: check the other machines; Ray is still running on this machine, until ray stop "
        "ends it"
    )
    require_error(1, expected, capfd.readouterr())


@pytest.mark.usefixtures("json_lines", "_late_node")
def test_every_line_is_json_on_request(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--expect-nodes", "2"]) == 1
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(line["level"], line["message"].split(":")[0]) for line in lines] == [
        ("info", "waiting up to 300 s for 2 nodes"),
        ("error", "1 of 2 nodes joined"),
    ]
    assert {line["logger"] for line in lines} == {"rlhf_stack.messages"}


def test_an_invalid_log_format_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(env_vars.LOG_FORMAT, "xml")
    assert main([*WORDS, "--dry-run"]) == 2
    assert capsys.readouterr().err == "error: RLHF_STACK_LOG_FORMAT='xml': expected text or json\n"


@pytest.mark.parametrize("name", [auth_token.TOKEN, auth_token.TOKEN_PATH, ""])
@pytest.mark.usefixtures("messages_as_before")
def test_a_token_that_ray_ignores_is_a_warning(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ray 2.9.3 and 2.12.0 have no tokens."""
    for variable in (auth_token.MODE, auth_token.TOKEN, auth_token.TOKEN_PATH):
        monkeypatch.delenv(variable, raising=False)
    if name:
        monkeypatch.setenv(name, "x" * 32)
    monkeypatch.setattr(auth_token, "is_supported", lambda: False)
    monkeypatch.setattr(start, "version", lambda _: "2.12.0")
    assert main(["start", "--head", "--node-ip-address", "127.0.0.1", "--dry-run"]) == 0
    errors = capfd.readouterr().err
    assert (f"Ray 2.12.0 has no tokens and ignores {name}: whoever" in errors) == bool(name)
    assert bool(errors) == bool(name)


def test_without_a_token_ray_starts_without_one(
    ray: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where a token exists every command but this one needs it."""
    ray(0)
    monkeypatch.setenv(auth_token.MODE, "token")
    assert main(WORDS) == 0
    assert json.loads(capfd.readouterr().out)["token"] is False
    assert auth_token.MODE not in os.environ


@pytest.mark.parametrize(
    ("options", "server"),
    [
        (["--head"], "http://127.0.0.1:8265"),
        (["--head", "--dashboard-host", "10.0.0.3"], "http://10.0.0.3:8265"),
        (["--join", "127.0.0.1"], None),
    ],
)
def test_the_job_server_is_awaited_where_it_listens(
    options: list[str],
    server: str | None,
    ray: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the head's own address for the dashboard, `start --expect-nodes` ended Ray after its timeout."""
    waited: list[Any] = []

    def wait(*given: Any) -> None:
        waited.extend(given)
        raise readiness.NotReadyError("seen")

    ray(0)
    monkeypatch.setattr(readiness, "wait_for_nodes", wait)
    monkeypatch.setattr(start, "wait_for_port", lambda *_: None)
    words = [word for word in WORDS if word != "--head"]
    assert main([*words, *options, "--expect-nodes", "2"]) == 1
    assert waited[3] == server


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_nodes(
    number: int,
    ray: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It was sent to `ray start`, which had ended."""

    def wait(*_: Any) -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.1)
        raise readiness.NotReadyError("the signal had no effect")

    ray(0)
    monkeypatch.setattr(readiness, "wait_for_nodes", wait)
    assert main([*WORDS, "--expect-nodes", "2"]) == 130
    require_error(130, "interrupted", capfd.readouterr())
