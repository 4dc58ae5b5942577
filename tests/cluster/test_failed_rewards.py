"""A reward function that fails ends the run with its cause."""

import pytest
from trained import SECTIONS

SECONDS = 300
FAILING = "def reward_func(queries, prompts, labels):\n    raise KeyError(labels[0])\n"


@SECTIONS
@pytest.mark.integration
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(
    ("layout", "more"), [("hybrid", ()), ("separate", ("--train.async_enable",))], ids=["hybrid", "async"]
)
def test_a_failing_reward_function_ends_the_run(train, layout, more, tmp_path):
    function = tmp_path / "failing.py"
    function.write_text(FAILING)
    run = train(layout, (2, 2), 2, SECONDS, "--reward.remote_url", str(function), *more)
    assert run.code != 0
    assert f"no reward from {function}: KeyError" in run.log
    assert "NoneType" not in run.log
    assert run.left_over == []
