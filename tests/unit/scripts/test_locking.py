"""Two processes that would write the same files."""

import subprocess
import sys
from pathlib import Path

from scripts.locking import exclusive_lock

OTHER = """
import sys
from pathlib import Path
from scripts.locking import exclusive_lock

with exclusive_lock(Path(sys.argv[1]), "another build"):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_the_second_process_waits_and_prints_for_what(tmp_path: Path) -> None:
    """The second process proceeds as soon as the first has ended, also if it was killed."""
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as first,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as second,
    ):
        assert first.stdout
        assert second.stdout
        lines = {first: first.stdout.readline(), second: second.stdout.readline()}
        assert sorted(lines.values()) == ["in\n", "waiting for another build that is already running\n"]
        inside = next(process for process, line in lines.items() if line == "in\n")
        waiting = second if inside is first else first
        inside.kill()
        assert waiting.stdout
        assert waiting.stdout.readline() == "in\n"
        waiting.communicate("")
    with exclusive_lock(tmp_path, "no other"):
        pass
