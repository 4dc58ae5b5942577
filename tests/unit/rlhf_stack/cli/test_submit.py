"""rlhf_stack.cli.commands.submit: the runtime environment of a job."""

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cli import run_options, supervised
from rlhf_stack.cli.commands import submit
from rlhf_stack.cli.commands.submit import runtime_env
from rlhf_stack.cli.job_output import JobOutput
from rlhf_stack.cli.main import main
from rlhf_stack.compat import attention_provider
from rlhf_stack.config import env_vars, image
from rlhf_stack.errors import UserError
from rlhf_stack.openrlhf import command_line
from rlhf_stack.placement import FreeNode, reservation
from rlhf_stack.planning import Machine, cluster_spec
from rlhf_stack.planning.assessment import ALLOW_LONG
from rlhf_stack.recovery import job
from rlhf_stack.recovery.attempts import Attempt
from rlhf_stack.recovery.job import Ended, HeadSilentError
from rlhf_stack.recovery.supervisor import State, Supervisor, TakenOverError

Supervise = Callable[[Callable[[Supervisor], Ended]], MagicMock]
HERE = {
    "PATH": "/bin",
    "RLHF_STACK_ACCELERATOR": "cpu",
    "RLHF_STACK_VERIFY_SYNC": "1",
    "RLHF_STACK_EVENTS": "",
    "RLHF_STACK_PROFILE": "nccl",
    "WANDB_API_KEY": "secret",
}


def test_the_job_gets_the_settings_of_rlhf_stack_but_not_those_of_the_image() -> None:
    assert runtime_env(HERE, []) == {"env_vars": {"RLHF_STACK_VERIFY_SYNC": "1"}}


def test_a_default_of_the_image_is_left_to_the_profile_of_the_jobs_machines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(image, "env_defaults", lambda: {env_vars.SYNC_BACKEND: "gloo"})
    default = {env_vars.SYNC_BACKEND: "gloo", env_vars.SYNC_TIMEOUT: "60"}
    assert runtime_env(default, [])["env_vars"] == {env_vars.SYNC_TIMEOUT: "60"}
    assert runtime_env(default, [env_vars.SYNC_BACKEND])["env_vars"] == default
    other = default | {env_vars.SYNC_BACKEND: "nccl"}
    assert runtime_env(other, [])["env_vars"] == other


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("gloo", [], True),
        ("gloo", ["--env", env_vars.SYNC_BACKEND], False),
        ("nccl", [], False),
        ("auto", [], False),
        ("", [], False),
    ],
)
def test_a_value_of_the_shell_that_the_profile_replaces_is_reported_once(
    backend: str,
    options: list[str],
    message: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As gloo on ROCm, the image's default; ``auto`` is another value, which the job gets."""
    profile = [{"name": "NCCL_P2P_LEVEL", "value": "LOC"}, {"name": env_vars.SYNC_BACKEND, "value": "nccl"}]
    cell = {
        "env": [{"name": env_vars.SYNC_BACKEND, "value": "gloo"}],
        "accelerator": {"profiles": [{"name": "nccl", "env": profile}]},
    }
    (tmp_path / "cell.json").write_text(json.dumps(cell))
    read = image._cell
    monkeypatch.setattr(image, "_cell", lambda _: read(tmp_path))
    monkeypatch.setattr(submit, "_once", lambda *_: Ended("j", "SUCCEEDED", 0))
    monkeypatch.setenv(env_vars.PROFILE, "nccl")
    monkeypatch.setenv(env_vars.SYNC_BACKEND, backend)
    monkeypatch.setenv("NCCL_P2P_LEVEL", "SYS")  # not passed whatever the profile is
    assert main(["submit", *options, "--", "ls"]) == 0
    errors = capsys.readouterr().err
    expected = (
        f"the job uses {env_vars.SYNC_BACKEND}=nccl, of profile nccl; --env {env_vars.SYNC_BACKEND}=gloo"
    )
    assert errors == (f"rlhf-stack: {expected} selects the shell's value\n" if message else "")


def test_the_job_gets_named_variables(tmp_path: Path) -> None:
    found = runtime_env(HERE, ["WANDB_API_KEY", "NCCL_DEBUG=INFO", "RLHF_STACK_VERIFY_SYNC=0"], str(tmp_path))
    assert found["env_vars"] == {
        "RLHF_STACK_VERIFY_SYNC": "0",
        "WANDB_API_KEY": "secret",
        "NCCL_DEBUG": "INFO",
    }
    assert found["working_dir"] == str(tmp_path)
    assert runtime_env(HERE, [], "s3://bucket/code.zip")["working_dir"] == "s3://bucket/code.zip"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("NOT_SET", "is not set in this shell"),
        ("=x", "NAME=VALUE"),
        ("", "NAME=VALUE"),
        ("A B=x", "NAME=VALUE"),
        ("RLHF_STACK_PROFILE=nccl", "start the containers with docker run -e RLHF_STACK_PROFILE"),
        ("RLHF_STACK_PROFILE", "a job does not read it"),
        ("A=2", "--env A is given twice"),
    ],
)
def test_a_variable_that_the_job_cannot_use_is_an_error(text: str, error: str) -> None:
    with pytest.raises(UserError, match=error):
        runtime_env(HERE, ["A=1", "B=1", text])


@pytest.mark.parametrize("folder", ["/no/such", "/no/such/code.zip", "/dev/null", "a\0b"])
def test_a_folder_that_does_not_exist_is_an_error(folder: str) -> None:
    with pytest.raises(UserError, match=r"--working-dir .*: no such folder"):
        runtime_env(HERE, [], folder)


RUN = ["env", "NCCL_DEBUG=INFO", "RLHF_STACK_VERIFY_SYNC=1", "CUDA_VISIBLE_DEVICES=0", "python", "-m"]


@pytest.mark.parametrize(
    ("options", "program", "expected"),
    [
        ([], "openrlhf.cli.train_ppo_ray", {"NCCL_DEBUG": "INFO", "RLHF_STACK_VERIFY_SYNC": "1"}),
        (
            ["--env", "A=1"],
            "a.train_ppo_ray",
            {"A": "1", "NCCL_DEBUG": "INFO", "RLHF_STACK_VERIFY_SYNC": "1"},
        ),
        ([], "openrlhf.cli.train_sft", {}),  # it starts no actors
    ],
)
def test_variables_of_the_command_of_a_run_reach_its_actors(
    options: list[str],
    program: str,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ray starts them with the environment of their machine and the job's, not that of its driver."""
    once = MagicMock(return_value=Ended("j", "SUCCEEDED", 0))
    for name in [name for name in os.environ if name.startswith("RLHF_STACK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(submit, "_once", once)
    monkeypatch.setattr(submit, "_problems_after_wait", lambda *_: [])
    assert main(["submit", *options, "--", *RUN, program]) == 0
    assert [given.args[2]["env_vars"] for given in once.call_args_list] == [expected]
    warned = "CUDA_VISIBLE_DEVICES in the command has no effect" in capsys.readouterr().err
    assert warned == bool(expected)


def test_a_variable_of_the_command_and_of_the_job_is_given_twice(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "--env", "NCCL_DEBUG=WARN", "--", *RUN, "openrlhf.cli.train_ppo_ray"]
    assert main(words) == submit.WRONG_USAGE
    assert "--env NCCL_DEBUG is given twice, or also by env in the command" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--env", "WANDB_API_KEY=x"], "runtime_env contains WANDB_API_KEY"),
        (["--env", "PROXY=http://a:b@c"], "runtime_env contains PROXY"),
        (["--env", "NCCL_DEBUG=INFO"], ""),
        *(
            (["--", *line.split()], "the command line contains a secret")
            for line in (
                *("ls --logger.wandb.key abc", "ls --use_wandb=abc", "ls --hf_token abc", "ls --token abc"),
                *("ls --api-key abc", "ls --judge.password=abc", "WANDB_API_KEY=abc python a.py"),
                "env -u A WANDB_API_KEY=abc python -m a",
                "nohup env HTTPS_PROXY=http://abc:abc@c python a.py",
            )
        ),
        (["--", "bash", "-c", "WANDB_API_KEY=abc python a.py"], "the command line contains a secret"),
        *(
            (["--", *line.split()], "")
            for line in (
                "ls --data.input_key abc --rollout.max_new_tokens 9 --placeholder_token abc --pad_token abc",
                "ls --use_wandb True --hf_token --verbose --password",
                "ls --ckpt.best_metric_key abc --train.max_tokens_per_gpu 9 --data.disable_fast_tokenizer",
                "ls --hf_token $HF_TOKEN",
                "python a.py input_key=abc",
                "env TOKENIZERS_PARALLELISM=false WANDB_API_KEY= python a.py",
            )
        ),
    ],
)
def test_a_secret_that_ray_would_show_is_a_warning(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "_once", lambda *_: Ended("j", "SUCCEEDED", 0))
    command = words if "--" in words else [*words, "--", "ls"]
    assert main(["submit", *command]) == 0
    errors = capsys.readouterr().err
    assert (expected in errors) if expected else not errors
    assert "abc" not in errors


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (1, 1), (3, 3), (7, 7), (120, 1), (121, 1), (122, 1)])
def test_a_jobs_code_is_never_one_of_submit_itself(
    code: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "_once", lambda *_: Ended("j", "FAILED", code))
    assert main(["submit", "--", "ls"]) == expected


@pytest.mark.usefixtures("messages_as_before")
@pytest.mark.parametrize(("level", "lines"), [("info", 1), ("warning", 1), ("error", 0)])
def test_the_log_format_applies_to_the_command_and_its_job(
    level: str, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once = MagicMock(return_value=Ended("j", "SUCCEEDED", 0))
    for name in (env_vars.LOG_FORMAT, env_vars.LOG_LEVEL):
        monkeypatch.setenv(name, "")  # restored after the test
    monkeypatch.setattr(submit, "_once", once)
    options = ["--log-format", "json", "--log-level", level, "--env", "WANDB_API_KEY=x"]
    assert main(["submit", *options, "--", "ls"]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in printed] == ["warning"] * lines
    environment = once.call_args.args[2]["env_vars"]
    assert (environment[env_vars.LOG_FORMAT], environment[env_vars.LOG_LEVEL]) == ("json", level)


def test_an_invalid_log_format_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(env_vars.LOG_FORMAT, "xml")
    assert main(["submit", "--", "ls"]) == submit.WRONG_USAGE
    assert "RLHF_STACK_LOG_FORMAT='xml': expected text or json" in capsys.readouterr().err


@pytest.mark.usefixtures("messages_as_before", "no_room")
def test_an_error_and_a_wait_for_the_autoscaler_are_json_lines_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(env_vars.LOG_FORMAT, "json")
    monkeypatch.setattr(submit, "_once", MagicMock(side_effect=UserError("no job server")))
    assert main(["submit", "--", "x"]) == submit.WRONG_USAGE
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("info", "8 of 16 GPUs; the run will ask the autoscaler"),
        ("error", "no job server"),
    ]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is planned, whose job succeeds."""
    monkeypatch.setattr(command_line, "extract_arguments", lambda _: [])
    for name in ("parse_run", "read_shapes"):
        monkeypatch.setattr(run_options, name, lambda *_: ([], []))
    saved = MagicMock(**{"obstacles.return_value": []})
    monkeypatch.setattr(submit, "checkpoints_of", lambda _: (None, saved))
    monkeypatch.setattr(submit, "_once", lambda *_: Ended("j", "SUCCEEDED", 0))


@pytest.fixture
def no_room(planned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run for which the cluster has too few GPUs, and an autoscaler may be asked."""
    monkeypatch.setenv(env_vars.AUTOSCALE, "1")
    monkeypatch.setattr(run_options, "ray_machines", lambda *_: ([], []))
    refused = MagicMock(refusal="8 of 16 GPUs", problems=["8 of 16 GPUs"])
    monkeypatch.setattr("rlhf_stack.planning.assess", lambda *_: refused)


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize(
    ("busy", "room", "options", "code", "polls"),
    [
        (3, True, [], 0, 4),
        (99, True, [], submit.REFUSED, 6),
        (99, False, [], submit.REFUSED, 1),
        (99, True, ["--force"], 0, 1),
        (99, True, ["--env", f"{env_vars.AUTOSCALE}=1"], 0, 1),
    ],
    ids=["released", "never released", "too small", "forced", "autoscaler"],
)
def test_gpus_that_another_job_holds_are_awaited(
    busy: int,
    room: bool,
    options: list[str],
    code: int,
    polls: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    now, looks = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def machines(*_: object) -> list[Machine]:
        return [Machine("a", 8, 64, free_gpus=0.0 if len(looks) < busy else 8.0)]

    def assess(
        _run: object, seen: list[Machine], _shapes: object, variables: dict[str, str]
    ) -> SimpleNamespace:
        assert variables[env_vars.PLACEMENT_TIMEOUT] == "10", "the variables of the job"
        assert ALLOW_LONG not in variables, "of this shell alone: the job does not get it"
        if seen[0].free_gpus is not None:
            looks.append(now[0])
        refused = [] if room and seen[0].free.gpus else ["8 of 8 GPUs are missing\n  free: a"]
        idle = ["out of memory"] if refused and seen[0].free_gpus is None else []
        return SimpleNamespace(refusal="".join(refused), problems=[*refused, *idle])

    monkeypatch.setattr(submit, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setenv(env_vars.PLACEMENT_TIMEOUT, "900")
    monkeypatch.setenv(ALLOW_LONG, "1")
    monkeypatch.setattr(run_options, "ray_machines", machines)
    monkeypatch.setattr("rlhf_stack.planning.assess", assess)
    timeout = ["--env", f"{env_vars.PLACEMENT_TIMEOUT}=10"]
    assert main(["submit", *timeout, *options, "--", "x"]) == code
    assert len(looks) == polls
    errors = capsys.readouterr().err
    waits = "waiting up to 10 s (RLHF_STACK_PLACEMENT_TIMEOUT) for GPUs in use: 8 of 8 GPUs are missing"
    assert errors.count(waits) == (polls > 1)
    assert ("GPUs in use were not released within 10 s" in errors) == (polls == 6)
    assert ("out of memory" in errors) == (not room), "the reasons on idle GPUs too"


@pytest.mark.usefixtures("planned")
def test_a_run_is_planned_without_the_nodes_that_its_job_excludes(monkeypatch: pytest.MonkeyPatch) -> None:
    table = [
        {"Alive": True, "NodeManagerAddress": address, "Resources": {"GPU": 8.0, "CPU": 64.0}}
        for address in ("10.0.0.1", "10.0.0.2")
    ]
    live = [FreeNode(str(entry["NodeManagerAddress"]), 8, 64, 8) for entry in table]
    planned: list[str] = []

    def assess(_run: object, machines: list[Machine], *_: object) -> SimpleNamespace:
        planned.extend(machine.address for machine in machines)
        return SimpleNamespace(refusal="", problems=[])

    monkeypatch.setattr(run_options, "connected", lambda _: nullcontext())
    monkeypatch.setattr(cluster_spec, "ray", SimpleNamespace(nodes=lambda: table))
    monkeypatch.setattr(reservation, "_live_nodes", lambda _: live)
    monkeypatch.setattr("rlhf_stack.planning.assess", assess)
    assert main(["submit", "--env", f"{env_vars.EXCLUDED_NODES}=10.0.0.1", "--", "x"]) == 0
    assert planned == ["10.0.0.2"]


@pytest.mark.parametrize("during", ["submit", "follow"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_job_goes_on_and_is_named(
    number: int, code: int, during: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        signal.raise_signal(number)

    jobs = MagicMock(**{"new_id.return_value": "raysubmit_1", during: interrupted})
    monkeypatch.setattr(submit, "jobs", jobs)
    assert main(["submit", "--", "true"]) == code
    jobs.stop.assert_not_called()
    assert "ray job logs -f raysubmit_1, ray job stop raysubmit_1" in capsys.readouterr().err


@pytest.fixture
def supervise(monkeypatch: pytest.MonkeyPatch) -> Supervise:
    """Replace the loop of `submit --restarts`, on no cluster; return what stops its job."""

    def replace(loop: Callable[[Supervisor], Ended]) -> MagicMock:
        monkeypatch.setattr(submit, "_problems", lambda *_: [])
        saved = MagicMock(loads=True, unsaved=())
        monkeypatch.setattr(supervised, "checkpoints_of", lambda _: (MagicMock(), saved))
        cluster = MagicMock(**{"return_value.recall.return_value": None})
        monkeypatch.setattr(supervised, "RayCluster", cluster)
        monkeypatch.setattr(Supervisor, "supervise", loop)
        stop = MagicMock(cluster=cluster)
        monkeypatch.setattr(job, "stop", stop)
        monkeypatch.setattr(job, "ray_job", MagicMock(return_value="01000000"))
        return stop

    return replace


def interrupted(supervisor: Supervisor) -> Ended:
    supervisor.state.job = "raysubmit_1"
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("number", "code", "why"),
    [(signal.SIGTERM, 143, "terminated by SIGTERM"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_stops_a_supervised_job_and_is_an_error_as_json(
    number: int, code: int, why: str, supervise: Supervise, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop(supervisor: Supervisor) -> Ended:
        supervisor.state.job = "raysubmit_1"
        signal.raise_signal(number)
        raise AssertionError("the signal was ignored")

    before = signal.getsignal(signal.SIGTERM)
    stop = supervise(loop)
    assert main(["submit", "--restarts", "1", "--json", "--", "train"]) == code
    assert signal.getsignal(signal.SIGTERM) == before
    stop.assert_called_once()
    assert json.loads(capsys.readouterr().out) == {"schema": "rlhf-stack/error/1", "error": why, "code": code}


@pytest.mark.usefixtures("messages_as_before")
@pytest.mark.parametrize("stopped", [[False], KeyboardInterrupt])
def test_a_job_whose_end_is_not_confirmed_is_named_and_kept_after_an_interrupt(
    stopped: object, supervise: Supervise, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job server was silent, or Ctrl-C came twice: the state was deleted, and the job forgotten."""
    stop = supervise(interrupted)
    stop.side_effect = stopped
    assert main(["submit", "--restarts", "1", "--address", "http://head:8265", "--", "train"]) == 130
    stop.cluster.return_value.remember.assert_not_called()
    expected = "job raysubmit_1 may still run: ray job stop --address http://head:8265 raysubmit_1 stops it"
    assert capsys.readouterr().err.count(f"{expected}, and the same command follows it again\n") == 1


@pytest.mark.usefixtures("messages_as_before")
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_supervised_run_goes_on_when_nobody_reads_its_output(
    stream: str, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `submit ... 2>&1 | tee log` after Ctrl-C, which ends tee first."""
    closed = MagicMock(**{"write.side_effect": BrokenPipeError(errno.EPIPE, "Broken pipe")})

    def loop(supervisor: Supervisor) -> Ended:
        supervisor.state.job = "raysubmit_1"
        monkeypatch.setattr(sys, stream, closed)
        supervisor._write("a line of the job\n")
        raise KeyboardInterrupt

    stop = supervise(loop)
    assert main(["submit", "--restarts", "1", "--", "train"]) == 130
    stop.assert_called_once()
    closed.write.assert_called()


@pytest.mark.usefixtures("messages_as_before")
def test_a_run_that_is_not_supervised_is_left_when_nobody_reads_its_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = MagicMock(**{"write.side_effect": BrokenPipeError(errno.EPIPE, "Broken pipe")})
    monkeypatch.setattr(sys, "stdout", closed)
    with pytest.raises(BrokenPipeError):
        JobOutput("stdout", is_supervised=False)("a line")


def test_an_error_that_nobody_expects_leaves_the_job_to_the_same_command(supervise: Supervise) -> None:
    """Without its state, the same command would submit the run a second time beside the job."""

    def loop(supervisor: Supervisor) -> Ended:
        supervisor.state.job = "raysubmit_1"
        raise LookupError("a defect")

    stop = supervise(loop)
    assert main(["submit", "--restarts", "1", "--", "train"]) == 70
    stop.cluster.return_value.remember.assert_not_called()


@pytest.mark.usefixtures("messages_as_before")
@pytest.mark.parametrize(
    ("outcome", "code", "lines"),
    [(KeyboardInterrupt, 130, 2), (TakenOverError, submit.WRONG_USAGE, 1), (None, 0, 0)],
)
def test_a_run_that_another_command_has_taken_over_is_neither_stopped_nor_forgotten(
    outcome: type[BaseException] | None,
    code: int,
    lines: int,
    supervise: Supervise,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As when the first of two commands is ended, whose shell was lost."""
    kept = State(["train"], 1.0, "raysubmit_1").to_json()
    del kept["owner"]  # as an earlier version kept it
    cluster = MagicMock(**{"return_value.recall.return_value": kept})

    def loop(supervisor: Supervisor) -> Ended:
        cluster.return_value.recall.return_value = kept | {"owner": "other than " + supervisor.state.owner}
        if outcome:
            raise outcome
        return Ended("raysubmit_1", "SUCCEEDED", 0)

    stop = supervise(loop)
    monkeypatch.setattr(supervised, "RayCluster", cluster)
    assert main(["submit", "--restarts", "1", "--grace", "30", "--", "train"]) == code
    stop.assert_not_called()
    cluster.return_value.remember.assert_not_called()
    printed = capsys.readouterr().err
    assert printed.count("another `submit` supervises this run now") == (lines > 0)
    assert printed.count("raysubmit_1 may still run") == (lines > 1)


def test_a_run_that_has_ended_is_begun_from_the_first_step_by_the_same_command(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = [State(["train"], 1.0, "raysubmit_1").to_json()]
    begun = []

    def loop(supervisor: Supervisor) -> Ended:
        begun.append(supervisor.state.job)
        kept.append(supervisor.state.to_json())
        return Ended("raysubmit_1", "SUCCEEDED", 0)

    supervise(loop)
    cluster = MagicMock(recall=lambda: kept[-1], remember=kept.append)
    monkeypatch.setattr(supervised, "RayCluster", MagicMock(return_value=cluster))
    for _ in range(2):
        assert main(["submit", "--restarts", "1", "--", "train"]) == 0
    assert begun == ["raysubmit_1", ""]
    assert list(kept[-1]) == ["owner"], "which ends a supervisor of this run that is still alive"


def test_a_silent_head_is_not_asked_who_supervises_a_run(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's client connects to a port that nobody answers for minutes, and the signal has a deadline."""
    supervise(interrupted).return_value = False
    monkeypatch.setattr(job, "ray_job", MagicMock(side_effect=TimeoutError))
    cluster = MagicMock(**{"return_value.recall.side_effect": [None, AssertionError("asked")]})
    monkeypatch.setattr(supervised, "RayCluster", cluster)
    assert main(["submit", "--restarts", "1", "--", "train"]) == 130
    assert cluster.return_value.recall.call_count == 1


@pytest.mark.parametrize(("has_ended", "calls"), [(True, 1), (False, 0)])
def test_a_checkpoint_is_selected_after_a_signal_only_if_the_job_has_ended(
    has_ended: bool, calls: int, supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that a running job was writing was set aside, and another command was suggested too."""
    supervise(interrupted).return_value = has_ended
    selected = MagicMock()
    monkeypatch.setattr(supervised.Supervision, "_save", MagicMock())
    monkeypatch.setattr(supervised.Supervision, "_select", selected)
    assert main(["submit", "--grace", "30", "--address", "http://head:8265", "--", "train"]) == 130
    assert selected.call_count == calls


@pytest.mark.usefixtures("no_room")
def test_a_run_that_has_asked_the_autoscaler_in_vain_is_planned_on_the_nodes_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nodes were not awaited, and no smaller layout was tried."""
    found: list[list[str]] = []

    def cluster(
        _server: str, _address: str, _run: str, assess: Callable[..., list[str]], *_: object
    ) -> object:
        found.extend(assess(["train"], {env_vars.AUTOSCALE: "1"}, scales) for scales in (True, False))
        return MagicMock(recall=lambda: None)

    monkeypatch.setattr(supervised, "checkpoints_of", lambda _: (MagicMock(), MagicMock(unsaved=())))
    monkeypatch.setattr(supervised, "RayCluster", cluster)
    monkeypatch.setattr(Supervisor, "supervise", lambda _: Ended("j", "SUCCEEDED", 0))
    assert main(["submit", "--restarts", "1", "--", "train"]) == 0
    assert found == [[], ["8 of 16 GPUs"]]


@pytest.mark.usefixtures("json_lines")
def test_the_attempts_of_a_supervised_run_are_json_lines(
    supervise: Supervise, capsys: pytest.CaptureFixture[str]
) -> None:
    def loop(supervisor: Supervisor) -> Ended:
        supervisor.state.attempts = [
            Attempt("j1", "FAILED", 1, 61.0, resumed=0, saved=4, error="a rank died", lost=("10.0.0.2",)),
            Attempt(
                *("j2", "SUCCEEDED", 0, 9.0),
                resumed=4,
                saved=8,
                waited=600.4,
                changed=("actor.num_nodes 3 to 2", "checkpoint of step 4 converted"),
            ),
        ]
        return Ended("j2", "SUCCEEDED", 0)

    supervise(loop)
    assert main(["submit", "--restarts", "1", "--", "train"]) == 0
    assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == [
        "attempt: 1, job: j1, ended: failed, after: 61 s, from step: 1, saved step: 4, lost nodes: 10.0.0.2, "
        "error: a rank died",
        "attempt: 2, job: j2, waited before: 600 s, changed: actor.num_nodes 3 to 2; checkpoint of step 4 "
        "converted, ended: succeeded, after: 9 s, from step: 5, saved step: 8",
    ]


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        (["--restarts", "1"], 600.0),
        (["--restarts", "1", "--node-wait", "5"], job.LOST_SECONDS),
        (["--grace", "30"], job.LOST_SECONDS),
    ],
)
def test_a_job_on_a_head_that_does_not_answer_is_awaited_and_kept(
    options: list[str], seconds: float, supervise: Supervise
) -> None:
    """The state of its run was deleted, so that the same command submitted it a second time."""
    stop = supervise(MagicMock(side_effect=HeadSilentError("no answer", job.LOST)))
    assert main(["submit", *options, "--", "train"]) == job.LOST
    assert stop.cluster.call_args.args[-1] == seconds
    stop.cluster.return_value.remember.assert_not_called()


TRAINER = """
import argparse

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ds.ring_attn_size", type=int, default=1)
    parser.add_argument("--ds.attn_implementation", default="sdpa")
    parser.add_argument("--ds.load_in_4bit", action="store_true")
    parser.add_argument("--train.batch_size", type=int, default=128)
    args = parser.parse_args()
    print("[Warning] a message")
    train(args)
"""


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The jobs that are submitted, with an OpenRLHF whose trainers have a few flags."""
    jobs: list[list[str]] = []

    def once(_address: str, words: list[str], *_: object) -> Ended:
        jobs.append(words)
        return Ended("j", "SUCCEEDED", 0)

    file = tmp_path / "trainer.py"
    file.write_text(TRAINER)
    monkeypatch.setattr(command_line, "_installed", lambda _: ("0.11.2", file))
    monkeypatch.setattr("rlhf_stack.openrlhf.requirements.find_spec", lambda _: None)
    monkeypatch.setattr(attention_provider, "provider", lambda: "")
    monkeypatch.setattr(image, "about", lambda *_: image.About("cell"))
    monkeypatch.setattr(submit, "_once", once)
    return jobs


@pytest.mark.parametrize("program", ["train_sft", "train_dpo", "train_rm"])
@pytest.mark.parametrize("launcher", ["deepspeed --module", "torchrun --nproc_per_node 2 -m", "python -m"])
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            "--ds.ring_attn_size 2",
            "--ds.ring_attn_size 2 needs flash_attn and ring_flash_attn, not installed",
        ),
        ("--ds.load_in_4bit", "--ds.load_in_4bit needs bitsandbytes, not installed here"),
        ("--ds.attn_implementation flash_attention_2", "nothing here computes flash_attention_2 for --ds."),
        ("--train_batch_size 64", "instead of --train_batch_size use --train.batch_size"),
        ("--train.batch_size 0", "--train.batch_size 0: expected a number from 1"),
    ],
)
def test_a_trainer_that_the_image_cannot_run_is_refused(
    program: str,
    launcher: str,
    flags: str,
    reason: str,
    submitted: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Such jobs were submitted, and failed."""
    words = [*launcher.split(), f"openrlhf.cli.{program}", *flags.split()]
    assert main(["submit", "--", *words]) == submit.WRONG_USAGE
    assert reason in capsys.readouterr().err
    assert submitted == []


@pytest.mark.usefixtures("messages_as_before")
def test_a_trainer_that_the_image_can_run_is_submitted(
    submitted: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["deepspeed", "--include", "localhost:0", "--module", "openrlhf.cli.train_sft"]
    assert main(["submit", "--", *words]) == 0
    assert capsys.readouterr().err == "rlhf-stack: warning: OpenRLHF: [Warning] a message\n"
    assert submitted == [words]


def test_a_program_of_the_user_is_submitted_unchecked(submitted: list[list[str]]) -> None:
    words = ["python", "train_sft.py", "--ds.ring_attn_size", "2"]
    assert main(["submit", "--", *words]) == 0
    assert submitted == [words]


@pytest.mark.usefixtures("messages_as_before")
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["my-wrapper", "-m", "openrlhf.cli.train_ppo_ray"], "train_ppo_ray"),
        (["bash", "-c", "python -m openrlhf.cli.train_ppo_ray --x 1"], "train_ppo_ray"),
        (["torchrun", "-m", "--nnodes", "1", "openrlhf.cli.train_sft"], "train_sft"),
        (["python", "train_sft.py"], None),
        (["python", "evaluate.py", "--split", "train_sft"], None),
        (["ls", "/ckpt"], None),
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [[], ["--env", "PYTHONPATH=/fork"]], ids=["installed", "fork"])
def test_a_program_that_is_named_but_not_read_is_a_warning(
    options: list[str],
    words: list[str],
    named: str | None,
    submitted: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Such a run was submitted unplanned without a word."""
    assert main(["submit", *options, "--", *words]) == 0
    warning = f"{named} is named, but not read as the program that the command starts"
    assert (warning in capsys.readouterr().err) == (named is not None)
    assert submitted == [words]


@pytest.mark.parametrize("options", [["--working-dir"], ["--env", "PYTHONPATH=/fork"]])
@pytest.mark.parametrize("program", ["openrlhf/cli/train_sft.py", "-m openrlhf.cli.train_sft"])
def test_a_trainer_of_a_fork_is_submitted_unchecked(
    options: list[str], program: str, submitted: list[list[str]], tmp_path: Path
) -> None:
    (tmp_path / "openrlhf").mkdir()
    words = ["python", *program.split(), "--my_flag"]
    folder = [str(tmp_path)] if options == ["--working-dir"] else []
    assert main(["submit", *options, *folder, "--", *words]) == 0
    assert submitted == [words]


@pytest.mark.parametrize(("restarts", "warned"), [("1", True), ("0", False)])
def test_a_state_that_no_checkpoint_has_is_one_warning_at_the_start(
    restarts: str,
    warned: bool,
    supervise: Supervise,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    supervise(lambda _: Ended("j", "SUCCEEDED", 0))
    saved = MagicMock(loads=True, unsaved=("the average (--train.enable_ema)", "the position in x"))
    monkeypatch.setattr(supervised, "checkpoints_of", lambda _: (MagicMock(), saved))
    assert main(["submit", "--grace", "30", "--restarts", restarts, "--", "train"]) == 0
    lacks = "the checkpoints of this run lack the average (--train.enable_ema), the position in x:"
    assert capsys.readouterr().err.count(lacks) == warned


@pytest.mark.parametrize(
    ("folder", "flat", "options", "expected"),
    [
        ("/ckpt", False, ["--restarts", "1"], ""),
        (
            "ckpt/x",
            False,
            ["--restarts", "1"],
            "--ckpt.path ckpt/x: a relative path is below the working dir",
        ),
        ("ckpt/x", True, ["--grace", "30"], "--ckpt_path ckpt/x: a relative path is below the working dir"),
        (
            "ckpt/x",
            False,
            ["--restarts", "1", "--working-dir", "."],
            "where no restart finds the checkpoints",
        ),
        ("/ckpt", False, ["--restarts", "1", "--working-dir", "."], ""),
    ],
)
def test_a_relative_folder_for_checkpoints_is_reported(
    folder: str,
    flat: bool,
    options: list[str],
    expected: str,
    supervise: Supervise,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ranks saved below their own working directory, so that each restart silently began again."""
    supervise(lambda _: Ended("j", "SUCCEEDED", 0))
    saved = MagicMock(loads=False, unsaved=(), folder=Path(folder), every=20)
    monkeypatch.setattr(supervised, "checkpoints_of", lambda _: (MagicMock(flat=flat), saved))
    is_refused = "no restart" in expected
    assert main(["submit", *options, "--", "train"]) == (submit.WRONG_USAGE if is_refused else 0)
    printed = capsys.readouterr().err
    assert expected in printed
    assert ("absolute path, on storage that all nodes share" in printed) == bool(expected)
