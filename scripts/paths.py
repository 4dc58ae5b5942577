"""The path of the checkout, and of what all checkouts of a machine share."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rlhf-stacks")  # of the user
