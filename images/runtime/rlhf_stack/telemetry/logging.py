"""Lines for the log of a run: by print, since upstream's driver shows no records below a warning."""

import logging

logger = logging.getLogger("rlhf_stack")


def tell(text: str) -> None:
    """A line that says what happens."""
    print(f"rlhf_stack: {text}", flush=True)


def warn(text: str) -> None:
    """A warning: something works, but not as it should."""
    logger.warning(text)
