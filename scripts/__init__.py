"""The host's side of rlhf-stacks: each module runs as ``python -m scripts.<name>``."""

import sys
from importlib.util import find_spec

# While Python looks for the module of -m, that is all it has put in argv.
if sys.argv[:1] == ["-m"] and find_spec("msgspec") is None:
    sys.exit(
        "error: this Python is not the project's: run `bash scripts/nox.sh --version` once, "
        "then use .nox/host/bin/python"
    )
