"""JSON records that processes of a run share in the key-value store of Ray's GCS.

A process that Ray did not start can use it too: a child of an actor finds the GCS by ``RAY_ADDRESS``.
"""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlhf_stack.compat import ray_private
from rlhf_stack.lazy import ray
from rlhf_stack.telemetry import run_log

NAMESPACE = b"rlhf_stack"
TIMEOUT_SECONDS = 10.0
PATIENT_SECONDS = 60.0  # of what a run cannot do without, as long as Ray itself waits for its head

_warned = threading.Event()  # this process logged that the GCS did not answer


def put_record(key: str, record: dict[str, Any], seconds: float = TIMEOUT_SECONDS) -> None:
    """Store ``record`` (JSON values) at ``key``, replacing any previous record.

    Raises Ray's error if the GCS does not answer within ``seconds``.
    """
    value = json.dumps(record).encode()
    _client().internal_kv_put(key.encode(), value, True, NAMESPACE, timeout=seconds)


def report_record(key: str, record: dict[str, Any]) -> None:
    """Store ``record`` as `put_record` does, if the GCS answers; otherwise the process warns, once.

    It is for records that are only read to describe an error or an event, and never raises.
    """
    with best_effort(f"store {key!r}"):
        put_record(key, record)


@contextmanager
def best_effort(action: str) -> Iterator[None]:
    """Leave the block if the GCS does not answer in it, with one warning of the process.

    ``action`` completes "Ray's head did not ...".
    """
    try:
        yield
    except Exception as error:  # of any type: Ray's differ from release to release
        if not _warned.is_set():
            _warned.set()
            run_log.warning(
                f"Ray's head did not {action}, so that errors and events may lack a name, a step or a time: "
                f"{error}; later failures of this process are not logged"
            )


def add_record(key: str, record: dict[str, Any]) -> bool:
    """Store ``record`` (JSON values) at ``key``, unless there is one; report whether it was stored."""
    value = json.dumps(record).encode()
    return bool(_client().internal_kv_put(key.encode(), value, False, NAMESPACE, timeout=TIMEOUT_SECONDS))


def list_records(prefix: str, seconds: float = TIMEOUT_SECONDS) -> list[dict[str, Any]]:
    """Return the records whose keys begin with ``prefix``, ordered by key.

    Raises Ray's error if the GCS does not answer a request within ``seconds``.
    """
    client, keys = _client(), list_keys(prefix, seconds)
    return [json.loads(client.internal_kv_get(key.encode(), NAMESPACE, timeout=seconds)) for key in keys]


def list_keys(prefix: str, seconds: float = TIMEOUT_SECONDS) -> list[str]:
    """Return the keys of records that begin with ``prefix``, ordered; it raises as `list_records` does."""
    keys = _client().internal_kv_keys(prefix.encode(), NAMESPACE, timeout=seconds)
    return sorted(key.decode() for key in keys)


def _client() -> Any:
    if ray.is_initialized():
        return ray_private.gcs_client(ray.get_runtime_context().gcs_address)
    return ray_private.gcs_client(os.environ["RAY_ADDRESS"])
