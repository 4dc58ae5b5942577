"""What the façade of OpenRLHF 0.5.1 adds to the functions that it exports."""

import pytest
from rlhf_stack.config import env_vars
from rlhf_stack.hooks import openrlhf_v0_5 as hooks
from rlhf_stack.openrlhf import run_groups


def test_the_value_without_a_warning_is_the_valid_default() -> None:
    env_vars.check(hooks.WITHOUT_EFFECT)
    assert env_vars.min_engines(hooks.WITHOUT_EFFECT) == env_vars.min_engines({})


@pytest.mark.parametrize("name", hooks.WITHOUT_EFFECT)
@pytest.mark.parametrize(("value", "warnings"), [("2", 1), ("usual", 0), ("", 0)])
def test_a_variable_that_only_a_later_release_honours_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: str, warnings: int
) -> None:
    monkeypatch.setenv(name, value.replace("usual", hooks.WITHOUT_EFFECT[name]))
    monkeypatch.setattr(run_groups, "reserve_run", lambda _: {"actor": 1})
    assert hooks.reserve_run(None) == {"actor": 1}
    assert [record.message for record in caplog.records] == [
        f"{name}=2 has no effect: it needs OpenRLHF 0.11.2"
    ] * warnings
