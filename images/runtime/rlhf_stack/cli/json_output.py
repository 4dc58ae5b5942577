"""The JSON output of commands: one object that names its schema."""

import json
from typing import Any


def print_json(command: str, version: int, **fields: Any) -> None:
    """Print ``fields``, which must be JSON values, with ``schema``: ``rlhf-stack/<command>/<version>``.

    A version may gain fields. Removing a field or changing its meaning requires a new version.
    """
    schema = {"schema": f"rlhf-stack/{command}/{version}"}
    print(json.dumps(schema | fields, indent=1, allow_nan=False))
