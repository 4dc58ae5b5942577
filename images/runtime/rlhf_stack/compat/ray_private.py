"""Ray's private API. No other module imports or calls it.

Each function names the Ray versions on which it was checked; check them again before Ray is upgraded. Ray is
imported on the first call.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_stack.accelerator import visible_devices

REMOVED_WHEN_IDLE = 4  # AUTOSCALER_DRAIN_IDLE in Ray's NodeDeathInfo


def actor_state(actor: str) -> dict[str, Any]:
    """Return the GCS's record of the actor with hexadecimal id ``actor``; empty if it has none.

    Callers use ``State``, ``ActorClassName`` and ``Address`` (with ``IPAddress``). Checked on Ray 2.9.3,
    2.12.0 and 2.55.0.
    """
    from ray._private import state

    found: dict[str, Any] = state.actors(actor)
    return found


def handle_state(handle: Any) -> str:
    """Return the state of the actor of ``handle``: "ALIVE", "RESTARTING", "DEAD" or another of Ray's.

    Checked on Ray 2.55.0.
    """
    return str(actor_state(handle._actor_id.hex()).get("State"))


def incarnation(handle: Any) -> str:
    """Return an id of the process of the actor of ``handle``: another one after each restart.

    Checked on Ray 2.55.0.
    """
    number = handle._actor_id.hex()
    return f"{number}/{actor_state(number).get('NumRestarts')}"


def python_class(actor_class: Any) -> type:
    """Return the Python class of a Ray actor class, ``object`` of anything else. Checked on Ray 2.55.0."""
    metadata = getattr(actor_class, "__ray_metadata__", None)
    found: type = getattr(metadata, "modified_class", object)
    return found


def set_task_retries(actor_class: Any, times: int) -> None:
    """Make ``max_task_retries`` of a Ray actor class ``times`` by default. Checked on Ray 2.55.0."""
    actor_class._default_options["max_task_retries"] = times


def available_resources_per_node() -> dict[str, dict[str, float]]:
    """Return the free resources of each node by node id.

    Checked on Ray 2.9.3, where only the global state object has the method, 2.12.0 and 2.55.0.
    """
    from ray._private import state

    query = getattr(state, "available_resources_per_node", None) or state.state._available_resources_per_node
    available: dict[str, dict[str, float]] = query()
    return available


def gcs_client(address: str) -> Any:
    """Return a client of the GCS at ``address`` (HOST:PORT), also in a process that Ray did not start.

    Its ``internal_kv_*`` methods take and return bytes. Checked on Ray 2.9.3, 2.12.0 and 2.55.0.
    """
    from ray._raylet import GcsClient

    return GcsClient(address=address)


def node_end_times(address: str, timeout: float) -> dict[str, float]:
    """Return when each dead node ended, in seconds since 1970 by node id; empty before Ray 2.55.

    Raises a `RayError` if the GCS at ``address`` does not answer in ``timeout`` seconds. Read in Ray
    2.55.0; in 2.9.3 and 2.12.0 the values are dictionaries without this time.
    """
    table = gcs_client(address).get_all_node_info(timeout=timeout)
    ended = {node.hex(): getattr(info, "end_time_ms", 0) / 1000 for node, info in table.items()}
    return {node: seconds for node, seconds in ended.items() if seconds}


def was_removed_when_idle(entry: Mapping[str, Any]) -> bool:
    """Return whether autoscaler v2 removed the node of ``entry`` of ``ray.nodes()`` because it was idle.

    Read in Ray 2.55.0. False where the reason is missing: in 2.9.3 and 2.12.0, and with autoscaler v1.
    """
    return entry.get("DeathReason") == REMOVED_WHEN_IDLE


def has_ipv6() -> bool:
    """Report whether the installed Ray accepts IPv6 addresses of nodes, without importing it.

    Added in github.com/ray-project/ray/pull/56147. Checked on Ray 2.12.0 and 2.55.0; True without Ray.
    """
    spec = find_spec("ray")
    if not spec or not spec.origin:
        return True
    source = Path(spec.origin).with_name("_common") / "network_utils.py"
    return source.is_file() and "def is_ipv6(" in source.read_text(encoding="utf-8")


def has_token_authentication() -> bool:
    """Report whether the installed Ray authenticates by token (2.52 and later), without importing it.

    Importing Ray takes seconds. Checked on Ray 2.9.3, 2.12.0 and 2.55.0.
    """
    spec = find_spec("ray")
    return bool(
        spec and spec.origin and Path(spec.origin).with_name("_private").joinpath("authentication").is_dir()
    )


def node_gpu_entries() -> list[str] | None:
    """Return the entries of the variable that restricts the GPUs of this worker's node, None for all GPUs.

    Ray hides all GPUs from a task that requests none, but keeps what the variable was. Read in Ray 2.9.3,
    2.12.0 and 2.55.0.
    """
    from ray._private.worker import global_worker

    entries = global_worker.original_visible_accelerator_ids.get("GPU")
    return None if entries is None else [str(entry) for entry in entries]


def visible_devices_variable() -> str:
    """Return the variable by whose entries Ray names the GPUs that it assigns.

    ``CUDA_VISIBLE_DEVICES``, or on ROCm the one of that release. Checked on Ray 2.9.3 and 2.12.0 as patched
    for ROCm, and on 2.55.0.
    """
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager = get_accelerator_manager_for_resource("GPU")
    try:
        name: str = manager.get_visible_accelerator_ids_env_var()
    except ValueError:
        # Ray 2.55 on ROCm, where the node has one list in two variables: Ray restricts HIP's alone, and
        # then refuses the difference that it made.
        return visible_devices.HIP
    return name
