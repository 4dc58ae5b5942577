"""JSON records that processes of a run share in the key-value store of Ray's GCS.

A process that Ray did not start can use it too: a child of an actor finds the GCS by ``RAY_ADDRESS``.
"""

import json
import os
from typing import Any

from rlhf_stack.compat import ray_private
from rlhf_stack.lazy import ray
from rlhf_stack.telemetry import run_log

NAMESPACE = b"rlhf_stack"
TIMEOUT_SECONDS = 10.0

_lost_reports: list[str] = []  # keys of this process


def put_record(key: str, record: dict[str, Any]) -> None:
    """Store ``record`` (JSON values) at ``key``, replacing any previous record."""
    value = json.dumps(record).encode()
    _client().internal_kv_put(key.encode(), value, True, NAMESPACE, timeout=TIMEOUT_SECONDS)


def report_record(key: str, record: dict[str, Any]) -> None:
    """Store ``record`` as `put_record` does, if the GCS answers; otherwise the process warns, once.

    It is for records that are only read to describe an error, and never raises.
    """
    try:
        put_record(key, record)
    except Exception as error:  # of any type: Ray's differ from release to release
        if not _lost_reports:
            run_log.warning(
                f"Ray's head did not store {key!r}, so that errors may lack a name or a step: {error}; later "
                "failures of this process are not logged"
            )
        _lost_reports.append(key)


def add_record(key: str, record: dict[str, Any]) -> bool:
    """Store ``record`` (JSON values) at ``key``, unless there is one; report whether it was stored."""
    value = json.dumps(record).encode()
    return bool(_client().internal_kv_put(key.encode(), value, False, NAMESPACE, timeout=TIMEOUT_SECONDS))


def list_records(prefix: str) -> list[dict[str, Any]]:
    """Return the records whose keys begin with ``prefix``, ordered by key."""
    client = _client()
    keys = sorted(client.internal_kv_keys(prefix.encode(), NAMESPACE, timeout=TIMEOUT_SECONDS))
    return [json.loads(client.internal_kv_get(key, NAMESPACE, timeout=TIMEOUT_SECONDS)) for key in keys]


def _client() -> Any:
    if ray.is_initialized():
        return ray_private.gcs_client(ray.get_runtime_context().gcs_address)
    return ray_private.gcs_client(os.environ["RAY_ADDRESS"])
