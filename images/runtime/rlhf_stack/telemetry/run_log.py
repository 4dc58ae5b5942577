"""Log lines of a run: text, or JSON lines with RLHF_STACK_LOG_FORMAT=json, from RLHF_STACK_LOG_LEVEL on.

As text, lines about progress are printed, because upstream's driver hides log records below a warning. A JSON
line has ``time`` (unix seconds), ``level``, ``host``, ``pid``, ``logger`` and ``message``, and goes to the
standard output, as do those of every logger below ``rlhf_stack``.
"""

import functools
import json
import logging
import os
import socket

from rlhf_stack.config import env_vars

logger = logging.getLogger("rlhf_stack")


class JsonLines(logging.Handler):
    """Prints each record as one line of JSON."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record; an exception of it becomes part of the message."""
        line = {
            "time": record.created,
            "level": record.levelname.lower(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "logger": record.name,
            "message": self.format(record),
        }
        print(json.dumps(line), flush=True)


@functools.cache
def configure() -> bool:
    """Apply both variables in this process; return whether lines are JSON. `ValueError` if one is invalid."""
    logger.setLevel(env_vars.log_level().upper())
    is_json = env_vars.log_format() == "json"
    if is_json:
        logger.addHandler(JsonLines())
        logger.propagate = False
    return is_json


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
