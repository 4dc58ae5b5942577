"""rlhf_stack.cli.commands.submit: the runtime environment of a job."""

import pytest
from rlhf_stack.cli.commands import submit
from rlhf_stack.cli.commands.submit import runtime_env
from rlhf_stack.cli.main import main
from rlhf_stack.errors import UserError
from rlhf_stack.recovery.job import Ended

HERE = {
    "PATH": "/bin",
    "RLHF_STACK_ACCELERATOR": "cpu",
    "RLHF_STACK_VERIFY_SYNC": "1",
    "RLHF_STACK_EVENTS": "",
    "WANDB_API_KEY": "secret",
}


def test_the_job_gets_the_settings_of_rlhf_stack_but_not_those_of_the_image() -> None:
    assert runtime_env(HERE, []) == {"env_vars": {"RLHF_STACK_VERIFY_SYNC": "1"}}


def test_the_job_gets_named_variables() -> None:
    found = runtime_env(HERE, ["WANDB_API_KEY", "NCCL_DEBUG=INFO", "RLHF_STACK_VERIFY_SYNC=0"], "/code")
    assert found["env_vars"] == {
        "RLHF_STACK_VERIFY_SYNC": "0",
        "WANDB_API_KEY": "secret",
        "NCCL_DEBUG": "INFO",
    }
    assert found["working_dir"] == "/code"


@pytest.mark.parametrize("text", ["NOT_SET", "=x", ""])
def test_a_variable_without_a_value_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match="is not set in this shell"):
        runtime_env(HERE, [text])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--env", "WANDB_API_KEY=x"], "runtime_env contains WANDB_API_KEY"),
        (["--env", "PROXY=http://a:b@c"], "runtime_env contains PROXY"),
        (["--env", "NCCL_DEBUG=INFO"], ""),
        (["--", "ls", "--logger.wandb.key", "abc"], "the command line contains a secret"),
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
