"""rlhf_stack.known_bad.first_error: which process of a log failed first, and with what."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_stack.known_bad import first_error
from rlhf_stack.known_bad.first_error import GAP, signal_of

LOGS = sorted(Path(__file__).with_name("logs").glob("*.log"))
SITE = "/usr/lib/python3.11/site-packages"


def frame(path: str, line: int = 7, name: str = "step") -> str:
    return f'  File "{path}", line {line}, in {name}\n    call()\n'


def traceback(error: str, *paths: str) -> str:
    return "Traceback (most recent call last):\n" + "".join(frame(path) for path in paths) + f"{error}\n"


def prefixed(prefix: str, text: str) -> str:
    return "".join(f"{prefix} {line}\n" for line in text.splitlines())


def engine(pid: int, moment: str, error: str) -> str:
    """A traceback as vLLM logs it."""
    path = f"{SITE}/vllm/v1/worker/gpu_worker.py"
    return prefixed(f"(EngineCore pid={pid}) ERROR 07-04 {moment} [core.py:1108]", traceback(error, path))


NESTED = (
    "Traceback (most recent call last):\n"
    + frame("/job/openrlhf/cli/train_ppo_ray.py")
    + frame(f"{SITE}/ray/_private/worker.py")
    + "ray.exceptions.RayTaskError(IndexError): ray::Runner.run() (pid=16, ip=10.0.0.2, actor_id=1)\n"
    + frame("/job/trainer.py")
    + "ray.exceptions.RayTaskError(IndexError): ray::PolicyModelActor.fit() (pid=33, ip=10.0.0.3, repr=2)\n"
    + frame(f"{SITE}/openrlhf/trainer/ray/ppo_actor.py", 210, "ppo_train")
    + frame(f"{SITE}/torch/nn/modules/module.py")
    + "IndexError: list index out of range\n"
)
CHAIN = (
    traceback("KeyError: 'reward'", "/job/reward.py")
    + "\nDuring handling of the above exception, another exception occurred:\n\n"
    + traceback("ValueError: no reward", "/job/reward.py")
    + "\nThe above exception was the direct cause of the following exception:\n\n"
    + traceback("RuntimeError: step failed", "/job/train.py")
)
RESET = "(A pid=1, ip=10.0.0.1) ConnectionResetError: [Errno 104] Connection reset by peer\n"
ODD = "(B pid=2, ip=10.0.0.2) odd.OddError: strange\n"
IGNORED = "Exception ignored in: <function Store.__del__>\n" + traceback(
    "AttributeError: no comm", "/job/a.py"
)
DEATH = (
    "(raylet) A worker died or was killed. Worker IP address: 10.0.0.4 Worker port: 1 Worker PID: 870 "
    "Worker exit type: SYSTEM_ERROR Worker exit detail: {}\n"
)
NO_LONGER = DEATH.format("Worker unexpectedly exits with a connection error code 2. End of file.")
SUMMARY = (
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \ntrain.py FAILED\n"
    "Root Cause (first observed failure):\n[0]:\n  time      : 2026-05-21_15:43:03\n  host      : node-b\n"
    "  rank      : 3 (local_rank: 1)\n  exitcode  : -9 (pid: 14750)\n"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            NESTED,
            {
                "text": "IndexError: list index out of range",
                "origin": "PolicyModelActor.fit pid=33, ip=10.0.0.3",
                "frame": "openrlhf/trainer/ray/ppo_actor.py:210 in ppo_train",
                "order": "only",
            },
        ),
        (
            CHAIN,
            {
                "text": "KeyError: 'reward'",
                "led_to": "RuntimeError: step failed",
                "frame": "/job/reward.py:7 in step",
            },
        ),
        (
            engine(2, "10:00:07", "ValueError: b") + engine(1, "10:00:02", "ValueError: a"),
            {
                "text": "ValueError: a",
                "origin": "EngineCore pid=1",
                "order": "time",
                "later": 1,
                "same": 0,
                "line": 8,
            },
        ),
        (
            engine(1, "10:00:02", "ValueError: 1") + engine(2, "10:00:02", "ValueError: 2"),
            {"text": "ValueError: 1", "order": "unclear", "same": 1},
        ),
        (
            "(A pid=1) odd.OddError: a\n(B pid=2) ValueError\n(C pid=3) ValueError\n(B pid=2) ValueError\n",
            {"origin": "A pid=1", "order": "lines", "later": 3, "same": 0},
        ),
        (ODD + RESET, {"text": "odd.OddError: strange", "order": "only", "later": 1, "passed_on": False}),
        (RESET + ODD, {"text": "odd.OddError: strange", "order": "unclear", "later": 0}),
        (RESET, {"origin": "A pid=1, ip=10.0.0.1", "passed_on": True}),
        (
            IGNORED + traceback("ValueError: a", "/job/b.py"),
            {"text": "ValueError: a", "frame": "/job/b.py:7 in step"},
        ),
        (NO_LONGER + RESET, {"origin": "pid=870, ip=10.0.0.4", "passed_on": False, "later": 1}),
        (NO_LONGER + prefixed("(W pid=870)", "ValueError: a"), {"text": "ValueError: a", "order": "only"}),
        (DEATH.format("The process receives a SIGTERM."), {"passed_on": True}),
        (SUMMARY, {"text": "exitcode  : -9 (pid: 14750) (SIGKILL)", "line": 8}),
        (
            SUMMARY,
            {"launcher": "rank 3 on node-b, pid 14750: exit code -9 (SIGKILL) at 2026-05-21_15:43:03"},
        ),
        ("job exits with return code = 139\n", {"text": "job exits with return code = 139 (SIGSEGV)"}),
        ("x died, exit code: -15\n", {"passed_on": True}),
        ("failed (exitcode: 1) local_rank: 1 (pid: 35) of binary: python\n", {"passed_on": True}),
        (
            "ERROR 01-29 08:37:48 [c.py:5] Engine core proc EngineCore_DP1 died\nEngineDeadError: a\n",
            {"text": "Engine core proc EngineCore_DP1 died", "passed_on": False},
        ),
        (
            "node-a:77:120 [0] socket.cc:441 NCCL WARN no room\n",
            {"origin": "node-a pid=77", "text": "node-a:77:120 [0] socket.cc:441 NCCL WARN no room"},
        ),
        (
            "[rank3]:[E901 05:20:03.6 P.cpp:1] [Rank 3] Watchdog caught collective operation timeout\n",
            {"origin": "rank3", "time": "E901 05:20:03.6", "passed_on": True},
        ),
        (
            "terminate called after throwing an instance of 'c10::Error'\n  what():  not here\n",
            {"text": "what():  not here"},
        ),
        ("OldError: a\n" + "fine\n" * GAP + "NewError: b\n", {"text": "NewError: b", "later": 0}),
        ("\x1b[36m(A pid=1)\x1b[0m OddError: a\r\n", {"text": "OddError: a", "origin": "A pid=1"}),
        ("2026-13-45 10:00:00 (A pid=1) OddError: a\n(B pid=2) OddError: a\n", {"order": "lines"}),
    ],
    ids=lambda value: None if isinstance(value, dict) else value.strip().partition("\n")[0][:40],
)
def test_the_first_failure_is_found(text: str, expected: dict[str, Any]) -> None:
    found = first_error(text)
    assert found
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    "text",
    ["", "all is well\n", "rank 0: exit code 0\nreturn code = 1\n", IGNORED, "(A pid=1) ERROR rate 0.1\n"],
)
def test_a_log_without_a_failure_has_none(text: str) -> None:
    assert first_error(text) is None


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_the_first_failure_of_each_log_is_a_line_of_it(log: Path) -> None:
    text = log.read_text(encoding="utf-8")
    found = first_error(text)
    assert (found is None) or not log.stem.startswith("healthy")
    if found and not found.text.startswith("worker ended: ") and not found.text.endswith(")"):
        assert found.text in text.splitlines()[found.line - 1]


def test_lines_of_the_end_of_a_log_count_from_its_end() -> None:
    found = first_error("one\nOddError: a\nthree\n", complete=False)
    assert found
    assert found.line == -2


@pytest.mark.parametrize(
    ("code", "name"), [(-9, "SIGKILL"), (137, "SIGKILL"), (-7, "SIGBUS"), (1, ""), (999, "")]
)
def test_the_signal_of_an_exit_code(code: int, name: str) -> None:
    assert signal_of(code) == name


PIECES = [NESTED, CHAIN, RESET, ODD, IGNORED, NO_LONGER, SUMMARY, "x\n", "(", "[rank0]: ", 'File "', "\x1b[3"]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=60), max_size=8))
def test_any_text_can_be_a_log(pieces: list[str]) -> None:
    text = "".join(pieces)
    found = first_error(text)
    assert found is None or 1 <= found.line <= text.count("\n") + 1


@pytest.mark.timeout(30)
def test_a_large_log_is_read_in_seconds() -> None:
    text = (NESTED + ODD + "(" * 1900 + "\n" + "a " * 900 + "\n") * 2000
    assert first_error(text)
