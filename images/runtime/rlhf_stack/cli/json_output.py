"""What a command prints for programs: one JSON object that names its schema."""

import json
from typing import Any


def show_json(command: str, version: int, **fields: Any) -> None:
    """Print ``fields``, which must be JSON values, under ``schema``: ``rlhf-stack/<command>/<version>``.

    Fields may be added to a version. One that is taken away, or means something else, makes a new version.
    """
    schema = {"schema": f"rlhf-stack/{command}/{version}"}
    print(json.dumps(schema | fields, indent=1, allow_nan=False))
