"""rlhf_stack.cli.commands.submit: the runtime environment of a job."""

import pytest
from rlhf_stack.cli.commands.submit import runtime_env
from rlhf_stack.errors import UserError

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
