"""Log lines of a run: text, or JSON lines with RLHF_STACK_LOG_FORMAT=json, from RLHF_STACK_LOG_LEVEL on.

As text, lines about progress are printed, because upstream's driver hides log records below a warning. A JSON
line has ``time`` (unix seconds), ``level``, ``host``, ``pid``, ``logger`` and ``message``, and goes to the
standard output, as do those of every logger below ``rlhf_stack``. The messages of a command have the same
formats, on standard error.
"""

import contextlib
import functools
import json
import logging
import os
import socket
import sys

from rlhf_stack.config import env_vars

logger = logging.getLogger("rlhf_stack")
messages = logging.getLogger("rlhf_stack.messages")  # of a command


class JsonFormatter(logging.Formatter):
    """Formats each record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; an exception of the record becomes part of the message."""
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "logger": record.name,
            "message": super().format(record),
        }
        return json.dumps(line)


class _Text(logging.Formatter):
    """Formats the messages of a command."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return f"rlhf-stack: {'warning: ' * (record.levelno == logging.WARNING)}{super().format(record)}"


class _Lines(logging.Handler):
    """Prints each record to the standard output or error of this moment."""

    def __init__(self, stream: str, formatter: logging.Formatter) -> None:
        super().__init__()
        self._stream = stream
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record, unless nobody reads it any more, or the disk is full: the run goes on."""
        with contextlib.suppress(OSError):
            print(self.format(record), file=getattr(sys, self._stream), flush=True)


@functools.cache
def configure() -> bool:
    """Apply both variables in this process; return whether lines are JSON. `ValueError` if one is invalid."""
    logger.setLevel(env_vars.log_level().upper())
    is_json = env_vars.log_format() == "json"
    if is_json:
        logger.addHandler(_Lines("stdout", JsonFormatter()))
        logger.propagate = False
    return is_json


def configure_messages() -> None:
    """Apply both variables to the `messages` of a command; `UserError` if one is invalid."""
    level, is_json = env_vars.log_level(), env_vars.log_format() == "json"
    messages.setLevel(level.upper())
    messages.propagate = False
    messages.handlers = [_Lines("stderr", JsonFormatter() if is_json else _Text())]


def line_of(text: str, prefix: str, level: int = logging.ERROR) -> str:
    """A message of any command, also with an invalid format: ``text`` after ``prefix``, or JSON."""
    if os.environ.get(env_vars.LOG_FORMAT) != "json":
        return prefix + text
    return JsonFormatter().format(messages.makeRecord(messages.name, level, "", 0, text, (), None))


def info(text: str) -> None:
    """Log a line about normal progress."""
    if configure():
        logger.info(text)
    elif logger.isEnabledFor(logging.INFO):
        print(f"rlhf_stack: {text}", flush=True)


def warning(text: str) -> None:
    """Log a warning: the run continues, but not as intended."""
    configure()
    logger.warning(text)
