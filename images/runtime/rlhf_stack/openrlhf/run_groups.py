"""The placement groups of a run: reserved once by the process that starts it, then claimed role by role."""

from typing import Any

from rlhf_stack.cluster.answer_once import repeats_calls
from rlhf_stack.lazy import ray
from rlhf_stack.openrlhf.request import DIGITS, request_of
from rlhf_stack.placement import reservation
from rlhf_stack.placement.model import ENGINES

ROLES = {  # OpenRLHF's actor classes, of releases 0.11 and 0.5
    "PolicyModelActor": "actor",
    "ReferenceModelActor": "ref",
    "CriticModelActor": "critic",
    "RewardModelActor": "reward",
    "ActorModelRayActor": "actor",
    "ReferenceModelRayActor": "ref",
    "CriticModelRayActor": "critic",
    "RewardModelRayActor": "reward",
}

TRAINED = "actor"

_unclaimed: dict[str, Any] = {}
_reserved: dict[str, Any] = {}


def reserve_run(args: Any) -> dict[str, Any]:
    """Reserve the placement groups of a run and return them by role; roles that share GPUs share a group.

    They replace what an earlier run of this process left unclaimed.
    """
    request, roles = request_of(args)
    reserved = reservation.reserve(request)
    groups = reserved | {role: reserved[name] for role, name in roles.items()}
    for kept in (_unclaimed, _reserved):
        kept.clear()
        kept.update(groups)
    return groups


def claim_role_group(actor_class: Any) -> Any:
    """Return the reserved group of a role by its Ray actor class, or None if the run reserved none.

    A group is returned once; with several reward models each call returns the next one's.
    """
    role = ROLES.get(class_name(actor_class))
    return next((_unclaimed.pop(name) for name in list(_unclaimed) if name.rstrip(DIGITS) == role), None)


def claim_engine_groups(count: int, size: int) -> Any:
    """Return a list with the group of each engine: those of the run, or new ones for ``size`` GPUs."""
    return _unclaimed.pop(ENGINES, None) or reservation.reserve_engines(count, size)


def controller(trainer_class: Any) -> Any:
    """Return OpenRLHF's trainer, an actor class, for the node of rank 0 of the reserved actor.

    The run ends with that node in any case, and so it does not end with any other one. Ray repeats its calls.
    What is no Ray actor class, or has no reserved actor, is returned unchanged.
    """
    actor_class = repeats_calls(trainer_class)
    group = _reserved.get(TRAINED)
    if group is None or not hasattr(actor_class, "options"):
        return actor_class
    node = ray.util.placement_group_table(group)["bundles_to_node_id"][0]
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=True)
    return actor_class.options(scheduling_strategy=strategy)


def wait_for_role_group(group: Any, actor_class: Any) -> None:
    """Wait for a group that a script created; `PlacementError` after the deadline lists what is missing."""
    reservation.wait_for_placement_group(group, class_name(actor_class))


def class_name(actor_class: Any) -> str:
    """Return the name of the Python class behind a Ray actor class, which has no ``__name__`` itself."""
    return str(actor_class.__ray_metadata__.class_name)
