"""Log lines of a run. They are printed, because upstream's driver hides log records below a warning."""

import logging

logger = logging.getLogger("rlhf_stack")


def info(text: str) -> None:
    """Print a line about normal progress."""
    print(f"rlhf_stack: {text}", flush=True)


def warning(text: str) -> None:
    """Log a warning: the run continues, but not as intended."""
    logger.warning(text)
