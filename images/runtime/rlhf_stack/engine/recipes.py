"""How each engine of a run was created, so that any process of the run can create it again on other nodes.

The process that creates the engines stores a record of each in the GCS. A replacement is a named actor; its
name is in the record, by which the other processes find it.
"""

from collections import Counter
from typing import Any

from rlhf_stack.cluster import gcs_kv
from rlhf_stack.cluster.actor_registry import PeerError
from rlhf_stack.config import env_vars
from rlhf_stack.engine import restarted
from rlhf_stack.lazy import ray
from rlhf_stack.placement import PlacementError, driver_cpus, reserve_engines
from rlhf_stack.placement.reservation import pinned_addresses, release
from rlhf_stack.telemetry import run_log

# At a time in an engine: above the number of its prompts, as calls that follow them are answered meanwhile.
MOST_CALLS = 100_000
LOSSES_OF_A_NODE = 2  # after which no engine moves to it if there is another place

_recorded: set[int] = set()


def record(index: int, strategy: Any, shares: bool, gpus: float, arguments: dict[str, Any]) -> int:
    """Store how engine ``index`` is created; return how often Ray may restart it.

    ``strategy`` is the ``PlacementGroupSchedulingStrategy`` of its actor, in a group that the engine
    ``shares`` with the trainer or not, ``gpus`` are the actor's, ``arguments`` those of its constructor.
    """
    if not env_vars.engine_restarts():
        return 0
    group = strategy.placement_group
    places = arguments["bundle_indices"] or [strategy.placement_group_bundle_index]
    entry = {
        "engine": index,
        "moved": False,
        "name": None,
        "awaited": None,  # after how many restarts a place was awaited in vain
        "group": None if shares else group.id.hex(),
        "addresses": pinned_addresses(group, places),
        "size": len(places),
        "sleeps": bool(arguments.get("enable_sleep_mode")),
        "gpus": gpus,
        "arguments": {
            name: sorted(value) if isinstance(value, set) else value for name, value in arguments.items()
        },
    }
    gcs_kv.put_record(_key(index), entry)
    _recorded.add(index)
    return env_vars.engine_restarts()


def created_here() -> bool:
    """Report whether this process has created the engines of the run, which can be restarted."""
    return bool(_recorded)


def load(index: int) -> dict[str, Any] | None:
    """Return the record of engine ``index``, None if the run has none."""
    return next((one for one in gcs_kv.list_records(_key(index)) if one["engine"] == index), None)


def sleeps(index: int) -> bool:
    """Report whether engine ``index`` sleeps while the trainer trains."""
    found = load(index)
    return bool(found and found["sleeps"])


def lost_nodes(index: int) -> list[str]:
    """Return the addresses of dead nodes to which engine ``index`` is pinned."""
    alive = {str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
    found = load(index)
    return sorted(set(found["addresses"]) - alive) if found else []


def note_lost_process(index: int) -> None:
    """Record that the process of engine ``index``, which Ray restarts in its place, was lost on its node."""
    with gcs_kv.best_effort(f"return the node of engine {index}"):
        if found := load(index):
            _note_loss_on(found["addresses"][0], f"engine-{index}-{restarted.count(index)}")


def _note_lost_nodes(index: int) -> None:
    """Record the loss of each dead node of engine ``index``, once for all engines that it had."""
    deaths = Counter(str(node["NodeManagerAddress"]) for node in ray.nodes() if not node["Alive"])
    with gcs_kv.best_effort(f"return the nodes of engine {index}"):
        for address in lost_nodes(index):
            _note_loss_on(address, f"node-{deaths[address]}")


def _note_loss_on(address: str, cause: str) -> None:
    gcs_kv.report_record(f"{_losses()}{address}/{cause}", {"address": address})


def unreliable_nodes() -> list[str]:
    """Return the addresses of nodes on which engines of this job were lost too often, if they are known."""
    records: list[dict[str, Any]] = []
    with gcs_kv.best_effort("return the losses of nodes"):
        records = gcs_kv.list_records(_losses())
    counts = Counter(str(record["address"]) for record in records)
    return sorted(address for address, count in counts.items() if count >= LOSSES_OF_A_NODE)


def _losses() -> str:
    return f"node-losses/{ray.get_runtime_context().get_job_id()}/"


def name(index: int) -> str | None:
    """Return the name of the actor that has replaced engine ``index``, None if none has."""
    found = load(index)
    return found["name"] if found else None


def current(index: int, handle: Any) -> Any:
    """Return the actor that is engine ``index`` now: ``handle``, or a living one that has replaced it."""
    found = name(index)
    try:
        return ray.get_actor(found) if found else handle
    except ValueError:
        return handle


def replace(index: int, former: Any, wait: bool = True) -> Any | None:
    """Create engine ``index`` on nodes with free GPUs; end ``former``, its actor, and release its place.

    Returns the new actor, which has not started, or None if there is no room; with ``wait`` and an
    autoscaler, room is awaited once after a loss. An engine that shares the GPUs of the trainer has no other
    place.
    """
    from openrlhf.trainer.ray.vllm_engine import RolloutRayActor

    entry = load(index)
    if entry is None or entry["group"] is None:
        return None
    used = restarted.count(index)
    if (left := env_vars.engine_restarts() - used) < 1:
        raise PeerError(
            f"engine {index} was restarted {used} times, as often as "
            f"{env_vars.ENGINE_RESTARTS} allows, and is lost again"
        )
    _note_lost_nodes(index)
    wait = wait and env_vars.flag(env_vars.AUTOSCALE) and entry["awaited"] != used
    if (group := _reserve(index, entry["size"], wait)) is None:
        if wait:
            gcs_kv.put_record(_key(index), entry | {"awaited": used})
        return None
    arguments, gpus = dict(entry["arguments"]), entry["gpus"]
    bundles = list(range(entry["size"]))
    if arguments["bundle_indices"] is not None:
        arguments["bundle_indices"] = bundles
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    unique = f"{_key(index)}/{group.id.hex()}"
    actor = RolloutRayActor.options(
        name=unique,
        num_cpus=driver_cpus(gpus),
        num_gpus=gpus,
        scheduling_strategy=strategy,
        max_restarts=left - 1,  # this is one of them
        max_concurrency=MOST_CALLS,
    )
    former_group = entry["group"]
    entry |= {"moved": True, "group": group.id.hex(), "addresses": pinned_addresses(group, bundles)}
    gcs_kv.put_record(_key(index), entry)  # before: the new process reads that it replaces another one
    handle = actor.remote(**arguments)
    gcs_kv.put_record(_key(index), entry | {"name": unique})  # after: other processes get it by this name
    ray.kill(former)
    release(former_group)
    run_log.warning(f"engine {index} moves to {', '.join(sorted(set(entry['addresses'])))}")
    return handle


def _reserve(index: int, size: int, wait: bool) -> Any | None:
    """Reserve a place for engine ``index``, on unreliable nodes only if there is no other; None if none.

    With ``wait`` it is awaited until `env_vars.placement_timeout`.
    """
    avoided = unreliable_nodes()
    if avoided:
        names = f"nodes on which engines were lost {LOSSES_OF_A_NODE} times: {', '.join(avoided)}"
        try:
            (group,) = reserve_engines(1, size, wait=False, avoid=avoided)
        except PlacementError:
            run_log.warning(f"engine {index} has no place without {names}")
        else:
            run_log.info(f"engine {index} avoids {names}")
            return group
    try:
        (group,) = reserve_engines(1, size, wait=wait)
    except PlacementError as error:
        run_log.info(f"engine {index} has no other place: {str(error).splitlines()[0]}")
        return None
    return group


def _key(index: int) -> str:
    return f"recipes/{ray.get_runtime_context().get_job_id()}/{index}"
