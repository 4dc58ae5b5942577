"""rlhf_stack.recovery.job: a job is followed over broken, silent and lost connections to its server."""

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import requests
from rlhf_stack.cluster.direct import exclude_from_proxy
from rlhf_stack.config import env_vars
from rlhf_stack.errors import UserError
from rlhf_stack.recovery import job
from rlhf_stack.recovery.job import Ended, HeadLostError, HeadSilentError
from rlhf_stack.telemetry import run_log

from tests.unit.stub_server import serving


class Server:
    """A job server: ``connections`` are the texts that each sees, ``states`` the answers to each question."""

    def __init__(self, connections: list[list[str]], states: list[str]) -> None:
        self.connections, self.states = connections, states
        self.is_silent = False
        self.jobs: list[str] = []
        self.answer: Exception | None = None  # instead of the job's id

    def client(self, _: str) -> "Server":
        return self

    async def tail_job_logs(self, _: str) -> AsyncIterator[str]:
        for text in self.connections.pop(0):
            yield text
        if self.is_silent:
            await asyncio.sleep(60)
        raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")

    def submit_job(self, submission_id: str, **_: object) -> str:
        self.jobs.append(submission_id)
        if self.answer:
            raise self.answer
        return submission_id

    def stop_job(self, name: str) -> bool:
        return bool(self.get_job_info(name))

    def get_job_info(self, name: str) -> SimpleNamespace:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if state == "unknown":
            raise RuntimeError(f"Request failed with status code 404: Job {name} does not exist.")
        if state == "unreachable":
            raise ConnectionError("connection refused")
        if state == "hangs":
            threading.Event().wait(60)
        return SimpleNamespace(status=state, message="why", driver_exit_code=3, job_id="02000000")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Server]:
    limits = (("SILENT", 0.05), ("ANSWER", 0.1), ("LOST", 0.3), ("POLL", 0.01), ("ACCEPT", 0.05))
    for name, seconds in limits:
        monkeypatch.setattr(job, f"{name}_SECONDS", seconds)

    def start(connections: list[list[str]], states: list[str], is_silent: bool = False) -> Server:
        server = Server(connections, states)
        server.is_silent = is_silent
        modules: dict[str, dict[str, Any]] = {
            "aiohttp": {"ClientError": OSError},
            "ray": {},
            "ray.exceptions": {"RayError": type("RayError", (Exception,), {})},
            "ray.job_submission": {"JobSubmissionClient": server.client},
        }
        for name, content in modules.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        return server

    return start


def follow(seconds: float = 0.0) -> tuple[Ended, str]:
    written: list[str] = []
    return job.follow("http://head:8265", "job1", written.append, seconds or job.LOST_SECONDS), "".join(
        written
    )


class Requests:
    """As Ray's client, it makes each request by ``requests``, which reads the environment each time."""

    def __init__(self, address: str) -> None:
        self.address = address
        requests.get(f"{address}/api/version", timeout=5).raise_for_status()

    def submit_job(self, **_: object) -> None:
        requests.get(f"{self.address}/api/jobs/", timeout=5).raise_for_status()


def test_a_submission_that_is_not_answered_ends(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve([], ["RUNNING"])
    monkeypatch.setattr(job, "SUBMIT_SECONDS", 0.05)

    class Paused:
        def __init__(self, address: str) -> None:
            """As the client of a head that is paused: the kernel accepts connections."""
            threading.Event().wait(60)

    monkeypatch.setattr(sys.modules["ray.job_submission"], "JobSubmissionClient", Paused)
    with pytest.raises(UserError, match="job server at http://head:8265: no answer within 0 s"):
        job.submit("http://head:8265", "job1", ["train"], {}, 0.1)


@pytest.mark.usefixtures("behind_proxy")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_job_is_submitted_without_a_proxy(
    host: str, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve([], [])
    monkeypatch.setattr(sys.modules["ray.job_submission"], "JobSubmissionClient", Requests)
    with serving(200) as port:
        job.submit(f"http://{host}:{port}", "a", ["true"], {}, 1.0)


@pytest.mark.parametrize(
    ("before", "address", "after"),
    [
        ("", "http://head:8265", "127.0.0.1,localhost,head"),
        ("", "https://[fd00::1]:8265/", "127.0.0.1,localhost,fd00::1"),
        ("", "10.0.0.1:8265", "127.0.0.1,localhost,10.0.0.1"),
        (".corp,localhost", "http://127.0.0.1:8265", ".corp,localhost,127.0.0.1"),
        ("*", "http://head:8265", "*"),
    ],
)
def test_hosts_are_added_to_those_without_a_proxy(
    before: str, address: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"NO_PROXY": before})
    exclude_from_proxy(address)
    exclude_from_proxy(address)
    assert os.environ["NO_PROXY"] == os.environ.get("no_proxy", before) == after


BROKEN = OSError("Connection aborted.")  # as requests' ConnectionError, which is not Python's
KNOWN = "Request failed with status code 500: Traceback ...\nValueError: submission_id a already exists."


@pytest.mark.parametrize(
    ("answer", "state"), [(None, ""), (BROKEN, "RUNNING"), (RuntimeError(KNOWN), "FAILED")]
)
def test_a_job_is_submitted_if_the_job_server_has_it(
    answer: Exception | None, state: str, serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was submitted a second time, or ended while its job ran."""
    run_log.configure_messages()
    server = serve([], [state])
    server.answer = answer
    job.submit("http://head:8265", "a", ["train"], {}, job.LOST_SECONDS)
    assert server.jobs == ["a"]
    assert capsys.readouterr().err == "rlhf-stack: job a\n"


@pytest.mark.parametrize("answer", [BROKEN, RuntimeError("No available agent"), ValueError("of runtime_env")])
def test_a_job_that_the_job_server_does_not_have_is_refused(
    answer: Exception, serve: Callable[..., Server]
) -> None:
    serve([], ["unknown"]).answer = answer
    with pytest.raises(UserError, match=f"Ray's job server at http://head:8265: {answer}") as found:
        job.submit("http://head:8265", "a", ["train"], {}, job.LOST_SECONDS)
    assert not isinstance(found.value, HeadLostError)


def test_a_job_may_run_if_its_submission_has_no_answer(serve: Callable[..., Server]) -> None:
    serve([], ["unreachable"]).answer = BROKEN
    with pytest.raises(HeadSilentError, match="Job a may still run"):
        job.submit("http://head:8265", "a", ["train"], {}, 0.0)


def test_a_job_is_not_awaited_if_nothing_was_sent(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "client", MagicMock(side_effect=ConnectionError("Failed to connect to Ray")))
    server = serve([], ["unreachable"])
    with pytest.raises(UserError, match="Ray's job server at http://head:8265: Failed to connect") as found:
        job.submit("http://head:8265", "a", ["train"], {}, 60.0)
    assert not isinstance(found.value, HeadLostError)
    assert server.jobs == []


def test_ids_of_jobs_differ() -> None:
    first, second = job.new_id(), job.new_id()
    assert first.startswith("raysubmit_")
    assert first != second


def test_a_broken_connection_is_made_again_and_no_output_is_printed_twice(
    serve: Callable[..., Server],
) -> None:
    serve([["step 1\n", "st"], ["step 1\nstep 2\n"], ["step 1\n"]], ["RUNNING", "RUNNING", "SUCCEEDED"])
    assert follow() == (Ended("job1", "SUCCEEDED", 0), "step 1\nstep 2\n")


def test_a_connection_that_was_dropped_silently_ends_with_the_job(serve: Callable[..., Server]) -> None:
    serve([["step 1\n"]], ["RUNNING", "RUNNING", "FAILED"], is_silent=True)
    assert follow() == (Ended("job1", "FAILED", 3), "step 1\n")


def test_a_head_that_does_not_answer_for_a_while_is_not_lost(serve: Callable[..., Server]) -> None:
    serve([["step 1\n"]], ["unreachable", "unreachable", "SUCCEEDED"])
    assert follow()[0].status == "SUCCEEDED"


def test_a_head_that_answers_again_within_the_given_time_is_not_lost(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job of such a head goes on; the run was submitted a second time."""
    run_log.configure_messages()
    monkeypatch.setattr(job, "LOST_SECONDS", 0.01)
    silence = ["unreachable"] * 5  # of a poll each, which is as long as `LOST_SECONDS`
    serve([["step 1\n"], ["step 1\nstep 2\n"]], [*silence, "RUNNING", "SUCCEEDED"])
    assert follow(60.0) == (Ended("job1", "SUCCEEDED", 0), "step 1\nstep 2\n")
    assert capsys.readouterr().err.count(" of 60 s: connection refused") == 1


@pytest.mark.parametrize(
    ("state", "text", "may_run"),
    [
        (
            "unknown",
            "was lost while job job1 ran: .*does not exist.*submit the command again, with the flag",
            False,
        ),
        (
            "unreachable",
            "did not answer for 0 s: connection refused. Job job1 may still run: ray job logs",
            True,
        ),
        ("hangs", "did not answer for 0 s: no answer within 0 s. Job job1 may still run: ray job logs", True),
    ],
)
def test_a_head_that_does_not_know_the_job_or_does_not_answer_is_lost(
    serve: Callable[..., Server], state: str, text: str, may_run: bool
) -> None:
    serve([["step 1\n"]], [state])
    with pytest.raises(HeadLostError, match=text) as found:
        follow()
    assert isinstance(found.value, HeadSilentError) == may_run
    assert ("flag that loads" in str(found.value)) != may_run, "with it, the same run would not be found"


def test_the_end_of_a_job_is_a_json_line_on_request(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve([[]], ["FAILED"])
    monkeypatch.setenv(env_vars.LOG_FORMAT, "json")
    try:
        run_log.configure_messages()
        assert job.follow("address", "j", print, 0.0).code == 3
    finally:
        monkeypatch.undo()
        run_log.configure_messages()
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["message"]) == ("error", "job j failed: why")


@pytest.mark.parametrize(
    ("states", "seconds", "expected"),
    [
        (["unreachable"], 1.0, "connection refused"),
        (["hangs"], 1.0, "no answer within 0 s"),
        (["RUNNING", "unreachable"], 1.0, "connection refused"),
        (["RUNNING"], 0.0, "it has not ended in 0 s"),
    ],
)
def test_a_job_that_cannot_be_stopped_is_a_warning(
    states: list[str],
    seconds: float,
    expected: str,
    serve: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It ended `submit` as a defect, after Ctrl-C with a head that was lost."""
    run_log.configure_messages()
    monkeypatch.setattr(job, "STOP_SECONDS", seconds)
    serve([["text"]], states)
    assert not job.stop("http://head:8265", "job1")
    assert capsys.readouterr().err.startswith(
        f"rlhf-stack: warning: job job1 may still run after its stop was requested: {expected}"
    )


def test_a_job_is_stopped_when_the_server_says_that_it_has_ended(
    serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    """The end of its log was taken for its end, which a connection that broke has too."""
    server = serve([], ["RUNNING", "RUNNING", "STOPPED"])
    assert job.stop("http://head:8265", "job1")
    assert server.states == ["STOPPED"]
    assert capsys.readouterr().err == ""


def test_a_job_that_was_not_submitted_is_stopped(
    serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its submission, which a signal interrupted, may still arrive."""
    serve([], ["unknown"])
    assert job.stop("http://head:8265", "job1")
    server = serve([], ["unknown", "RUNNING", "RUNNING", "STOPPED"])
    assert job.stop("http://head:8265", "job1")
    assert server.states == ["STOPPED"]
    assert capsys.readouterr().err == ""


def test_one_answer_that_fails_does_not_end_the_wait_for_the_end_of_a_job(
    serve: Callable[..., Server], capsys: pytest.CaptureFixture[str]
) -> None:
    """The state was kept though the job had ended, and the same command followed a stopped job."""
    serve([], ["RUNNING", "unreachable", "RUNNING", "STOPPED"])
    assert job.stop("http://head:8265", "job1")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("seconds", [0.05, 60.0])
def test_the_question_for_rays_id_of_a_job_has_a_limit(serve: Callable[..., Server], seconds: float) -> None:
    serve([], ["RUNNING", "hangs"])
    assert job.ray_job("http://head:8265", "job1", seconds) == "02000000"
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        job.ray_job("http://head:8265", "job1", seconds)
