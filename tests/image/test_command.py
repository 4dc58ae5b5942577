"""The command is there for whoever runs the image, and starts at once."""

import json
import subprocess
import sys
import time

START_SECONDS = 2.0


def test_the_command_is_on_the_path() -> None:
    """It lists its commands, and imports nothing heavy for it."""
    start = time.monotonic()
    done = subprocess.run(["rlhf-stack", "--help"], capture_output=True, text=True, check=False)
    assert time.monotonic() - start < START_SECONDS
    assert done.returncode == 0, done.stderr
    assert "patches" in done.stdout


def test_a_command_imports_only_what_it_needs() -> None:
    """Of the heavy ones none, unless it is asked to look at them."""
    code = (
        "import sys; from rlhf_stack.cli import main; main(['patches']); "
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_json_names_its_schema() -> None:
    """As every command's does."""
    done = subprocess.run(["rlhf-stack", "patches", "--json"], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["schema"] == "rlhf-stack/patches/1"
    assert told["patches"]
