"""rlhf_stack.telemetry.run_log: text or JSON lines, and the lowest level."""

import json
import logging
import os
from collections.abc import Iterator

import pytest
from rlhf_stack.config import env_vars
from rlhf_stack.telemetry import run_log


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Undo the configuration of the logger."""
    run_log.configure.cache_clear()
    handlers, level, propagate = list(run_log.logger.handlers), run_log.logger.level, run_log.logger.propagate
    yield
    run_log.logger.handlers[:] = handlers
    run_log.logger.setLevel(level)
    run_log.logger.propagate = propagate
    run_log.configure.cache_clear()


def test_text_is_the_default(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    run_log.info("a line")
    run_log.warning("careful")
    assert capsys.readouterr().out == "rlhf_stack: a line\n"
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", "careful")]


def test_lines_are_json_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(env_vars.LOG_FORMAT, "json")
    run_log.info('with "quotes"\nand lines')
    run_log.warning("careful")
    logging.getLogger("rlhf_stack.sync.backend").warning("of a %s", "module")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("info", 'with "quotes"\nand lines'),
        ("warning", "careful"),
        ("warning", "of a module"),
    ]
    assert lines[2]["logger"] == "rlhf_stack.sync.backend"
    assert all(line["pid"] == os.getpid() and line["time"] > 0 and line["host"] for line in lines)


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize(("level", "shown"), [("info", 2), ("warning", 1), ("error", 0)])
def test_lines_below_the_level_are_not_logged(
    form: str,
    level: str,
    shown: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(env_vars.LOG_FORMAT, form)
    monkeypatch.setenv(env_vars.LOG_LEVEL, level)
    run_log.info("a line")
    run_log.warning("careful")
    assert len(capsys.readouterr().out.splitlines()) + len(caplog.records) == shown


@pytest.mark.parametrize("name", [env_vars.LOG_FORMAT, env_vars.LOG_LEVEL])
def test_an_invalid_value_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "loud")
    with pytest.raises(ValueError, match=f"{name}='loud': expected"):
        run_log.info("a line")
