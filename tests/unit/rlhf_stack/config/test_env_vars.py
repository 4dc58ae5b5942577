import pytest
from rlhf_stack.config import env_vars


@pytest.mark.parametrize(("value", "expected"), [("", False), ("0", False), ("1", True)])
def test_flag_is_0_or_1(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv(env_vars.VERIFY_SYNC, value)
    assert env_vars.flag(env_vars.VERIFY_SYNC) is expected


def test_other_values_of_a_flag_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.VERIFY_SYNC, "yes")
    with pytest.raises(ValueError, match="RLHF_STACK_VERIFY_SYNC='yes': expected 0 or 1"):
        env_vars.flag(env_vars.VERIFY_SYNC)


def test_deadlines_have_defaults_and_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env_vars.SYNC_TIMEOUT, raising=False)
    monkeypatch.setenv(env_vars.ENGINE_TIMEOUT, "12.5")
    assert env_vars.sync_timeout() == 300
    assert env_vars.engine_timeout() == 12.5


@pytest.mark.parametrize("value", ["soon", "0", "-1", "inf", "nan"])
def test_invalid_deadline_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, value)
    with pytest.raises(ValueError, match=r"RLHF_STACK_SYNC_TIMEOUT=.*greater than 0"):
        env_vars.sync_timeout()
