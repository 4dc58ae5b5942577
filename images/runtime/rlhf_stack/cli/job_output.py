"""Where `rlhf-stack submit` prints the output of a job."""

import contextlib
import os
import sys

from rlhf_stack.telemetry.run_log import messages


class JobOutput:
    """Prints what a job prints to ``stream``, "stdout" or "stderr" of this process.

    If the reader has closed the pipe, or the disk is full, a run that is supervised goes on without output;
    otherwise the `OSError` ends the command, and not the job.
    """

    def __init__(self, stream: str, is_supervised: bool) -> None:
        self._stream, self._is_supervised = stream, is_supervised

    def __call__(self, text: str) -> None:
        """Print ``text`` at once."""
        stream = getattr(sys, self._stream)
        try:
            print(text, end="", file=stream, flush=True)
        except OSError as error:
            if not self._is_supervised:
                raise
            discard(self._stream)
            messages.warning(
                f"the job's output cannot be written any more ({error.strerror}): the run goes on without it"
            )


def discard(stream: str) -> None:
    """Let what is left of "stdout" or "stderr", and all that follows, be written without another error."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), getattr(sys, stream).fileno())
