"""Other programs, as commands whose output is text."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def captured(
    command: Sequence[str],
    folder: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` without input, and return its exit code and what it printed."""
    return subprocess.run(
        command,
        cwd=folder,
        env=env,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
