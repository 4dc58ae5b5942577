"""The variables of users: their values, and the errors for others."""

import copy
from collections.abc import Callable

import pytest
from rlhf_stack.config import env_vars
from rlhf_stack.errors import UserError


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


@pytest.mark.parametrize("value", ["soon", "0", "-1", "inf", "nan", "\u0663", "1_0", "1e9"])
def test_invalid_deadline_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, value)
    with pytest.raises(ValueError, match=r"RLHF_STACK_SYNC_TIMEOUT=.*greater than 0"):
        env_vars.sync_timeout()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(("", 32_000_000), ("0.05", 50_000), ("64", 64_000_000), ("64MB", 64_000_000), ("1 GB", 10**9)),
        *(("32MiB", 32 << 20), ("32Mi", 32 << 20), ("500kb", 500_000)),
    ],
)
def test_a_bucket_has_the_units_of_other_sizes(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: int
) -> None:
    """Without a unit it is in MB."""
    monkeypatch.setenv(env_vars.SYNC_BUCKET, value)
    assert env_vars.sync_bucket() == expected


@pytest.mark.parametrize(
    "value",
    ["nan", "inf", "-1", "0", "1e-9", "1e9", "65GiB", "32M", "32 bananas", "\u0663\u0662", "1_0", "x"],
)
def test_an_absurd_bucket_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(env_vars.SYNC_BUCKET, value)
    with pytest.raises(ValueError, match=r"^RLHF_STACK_SYNC_BUCKET_MB='.*': (expected a size from|M is amb)"):
        env_vars.sync_bucket()


def test_an_error_is_wrong_usage_of_a_command_and_can_leave_a_process() -> None:
    with pytest.raises(UserError) as raised:
        env_vars.check({env_vars.MIN_ENGINES: "0"})
    assert isinstance(raised.value, ValueError)
    assert str(copy.copy(raised.value)) == str(raised.value)


@pytest.mark.parametrize("name", env_vars.FLAGS)
def test_every_flag_is_checked(name: str) -> None:
    env_vars.check({name: "1"})
    with pytest.raises(ValueError, match=f"{name}='yes': expected 0 or 1"):
        env_vars.check({name: "yes"})


@pytest.mark.parametrize("read", [*env_vars.READERS, lambda names: env_vars.sync_backend(environment=names)])
def test_every_reader_is_that_of_a_variable(read: Callable[[dict[str, str]], object]) -> None:
    names = {name: "\0" for name in vars(env_vars).values() if str(name).startswith("RLHF_STACK_")}
    with pytest.raises(env_vars.VariableError, match=r"^RLHF_STACK_[A-Z_]+='\\x00': "):
        read(names)


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(ValueError, match="expected") as raised:
        env_vars.check({env_vars.LOG_FORMAT: "x" * 10_000})
    assert len(str(raised.value)) < 200
