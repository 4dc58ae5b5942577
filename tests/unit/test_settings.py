import pytest
from rlhf_stack import settings


@pytest.mark.parametrize(("value", "expected"), [("", False), ("0", False), ("1", True)])
def test_a_flag_is_0_or_1(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv(settings.VERIFY_SYNC, value)
    assert settings.flag(settings.VERIFY_SYNC) is expected


def test_another_value_of_a_flag_is_no_silent_yes_or_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.VERIFY_SYNC, "yes")
    with pytest.raises(ValueError, match="RLHF_STACK_VERIFY_SYNC='yes': expected 0 or 1"):
        settings.flag(settings.VERIFY_SYNC)


def test_deadlines_have_defaults_and_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.SYNC_TIMEOUT, raising=False)
    monkeypatch.setenv(settings.ENGINE_TIMEOUT, "12.5")
    assert settings.sync_timeout() == 300
    assert settings.engine_timeout() == 12.5


@pytest.mark.parametrize("value", ["soon", "0", "-1", "inf", "nan"])
def test_a_deadline_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(settings.SYNC_TIMEOUT, value)
    with pytest.raises(ValueError, match=r"RLHF_STACK_SYNC_TIMEOUT=.*greater than 0"):
        settings.sync_timeout()
