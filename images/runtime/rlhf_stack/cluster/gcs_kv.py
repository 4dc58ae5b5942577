"""What processes of a run leave for each other in the key-value store of Ray's head.

A process that is no part of Ray can do so as well: a child of an actor, which finds the head by RAY_ADDRESS.
"""

import json
import os
from typing import Any

NAMESPACE = b"rlhf_stack"
SECONDS = 10.0


def put(key: str, record: dict[str, Any]) -> None:
    """Leave ``record``, JSON values, at ``key``, in place of what is there."""
    _head().internal_kv_put(key.encode(), json.dumps(record).encode(), True, NAMESPACE, timeout=SECONDS)


def under(prefix: str) -> list[dict[str, Any]]:
    """The records whose keys begin with ``prefix``, in the order of their keys."""
    head = _head()
    keys = sorted(head.internal_kv_keys(prefix.encode(), NAMESPACE, timeout=SECONDS))
    return [json.loads(head.internal_kv_get(key, NAMESPACE, timeout=SECONDS)) for key in keys]


def _head() -> Any:
    import ray
    from ray._raylet import GcsClient

    if ray.is_initialized():
        return GcsClient(address=ray.get_runtime_context().gcs_address)
    return GcsClient(address=os.environ["RAY_ADDRESS"])
