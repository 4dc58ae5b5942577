"""The host's part of rlhf-stacks; its command is ``python -m scripts``."""

import sys
from importlib.util import find_spec
from pathlib import Path

# argv is only ["-m"] while Python resolves the module to run.
if sys.argv[:1] == ["-m"] and find_spec("msgspec") is None:
    sys.exit(
        "error: this Python is not the project's: run `bash scripts/nox.sh --version` once, "
        "then use .nox/host/bin/python"
    )

# The known-bad database is in the runtime's package, which is installed in images alone.
sys.path.append(str(Path(__file__).resolve().parents[1] / "images" / "runtime"))
