"""Which GPUs a process sees under the ``*_VISIBLE_DEVICES`` variables, and which one of them is Ray's: pure.

On CUDA one variable filters. On ROCm two layers do: ``ROCR_VISIBLE_DEVICES`` first, which renumbers what is
left from 0; then ``HIP_VISIBLE_DEVICES``, or ``CUDA_VISIBLE_DEVICES`` where HIP's is unset or empty, by those
new numbers. Sources: AMD's page on GPU isolation (ROCm 6.1), Device::init of ROCm/clr, pytorch#142292.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
NO_DEVICES = "NoDevFiles"  # what some schedulers write for an empty list
NOTHING = "-1"
NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
ON = ("1", "true")  # what newer releases of Ray take for on; older ones take any text, "0" too

Kind = Literal["cuda", "rocm"]
Environment = Mapping[str, str]


class Disagreement(ValueError):
    """Two variables, or one and the GPU that Ray assigned, that cannot both hold."""


def seen(environment: Environment, kind: Kind, count: int) -> list[str]:
    """The physical GPUs that a process sees, by its own ordinals; ``count`` are in the machine.

    A GPU is its number in the machine, or the UUID by which a variable names it. An entry that names no GPU
    ends its list, as the runtimes do; one that stands twice counts once.
    """
    names = [str(number) for number in range(count)]
    if kind == "rocm" and (below := _entries(environment, ROCR)) is not None:
        names = _taken(below, names)
    variable = _restricting(environment, kind)
    return names if variable is None else _taken(_entries(environment, variable) or [], names)


def ordinal(assigned: str, environment: Environment, kind: Kind, variable: str = CUDA) -> int:
    """The ordinal in this process of the GPU that Ray calls ``assigned``.

    ``variable`` is the one by whose entries Ray names GPUs. It does not matter whether Ray set it for this
    process or, told so by one of its NOSET variables, left it as it was on the node. `Disagreement` names the
    two that do not fit each other.
    """
    said = f"GPU {assigned} of Ray"
    if kind == "rocm" and variable == ROCR and (below := _entries(environment, ROCR)) is not None:
        if assigned not in below:
            raise Disagreement(_disagree(_shown(environment, ROCR), said))
        assigned = str(below.index(assigned))
    chosen = _restricting(environment, kind)
    if chosen is None:
        if not assigned.isdecimal():
            raise Disagreement(f"{said} is not a number, and no variable lists it")
        _check(environment, kind, [assigned], said)
        return int(assigned)
    entries = _entries(environment, chosen) or []
    _check(environment, kind, entries, _shown(environment, chosen))
    if assigned in entries:
        return entries.index(assigned)
    by_ray = assigned in (_entries(environment, variable) or [])
    raise Disagreement(
        _disagree(_shown(environment, chosen), _shown(environment, variable) if by_ray else said)
    )


def node_ids(environment: Environment) -> list[str] | None:
    """The names of the GPUs that Ray may hand out on a ROCm node, or None for all that there are.

    They are names for ``CUDA_VISIBLE_DEVICES``, whichever variable restricts the node.
    """
    below = _entries(environment, ROCR)
    chosen = _restricting(environment, "rocm")
    if chosen is None and (HIP in environment or CUDA in environment):
        return []  # HIP shows all of them then; Ray hands out none, as on CUDA
    if chosen is None:
        return None if below is None else [str(number) for number in range(len(below))]
    entries = _entries(environment, chosen) or []
    _check(environment, "rocm", entries, _shown(environment, chosen))
    return entries


def restricted(ids: Sequence[object], kind: Kind) -> dict[str, str]:
    """The variables with which a process sees exactly the GPUs ``ids`` of its node, in this order.

    HIP takes an empty list for no list at all, so on ROCm "-1", which is no GPU, ends it instead.
    """
    value = ",".join(map(str, ids))
    return {CUDA: value} if kind == "cuda" else dict.fromkeys((CUDA, HIP), value or NOTHING)


def left_alone(environment: Environment) -> bool:
    """Whether the user told Ray to leave ``CUDA_VISIBLE_DEVICES`` of its workers as it is on the node."""
    return environment.get(NOSET, "").lower() in ON


def _entries(environment: Environment, variable: str) -> list[str] | None:
    """The list in a variable, or None if it is unset: up to a "-1", and what stands twice counted once."""
    value = environment.get(variable)
    if value is None:
        return None
    named = itertools.takewhile(lambda entry: entry not in ("", NO_DEVICES, NOTHING), _split(value))
    return list(dict.fromkeys(named))


def _split(value: str) -> list[str]:
    return [entry.strip() for entry in value.split(",")]


def _restricting(environment: Environment, kind: Kind) -> str | None:
    """The variable by which the CUDA or HIP runtime filters, if any."""
    if kind == "cuda":
        return CUDA if CUDA in environment else None
    return next((variable for variable in (HIP, CUDA) if environment.get(variable)), None)


def _taken(entries: Sequence[str], names: Sequence[str]) -> list[str]:
    taken: dict[str, None] = {}
    for entry in entries:
        if entry.isdecimal() and int(entry) < len(names):
            taken[names[int(entry)]] = None
        elif entry.startswith(("GPU-", "MIG-")):
            taken[entry] = None
        else:
            break
    return list(taken)


def _check(environment: Environment, kind: Kind, entries: Sequence[str], said: str) -> None:
    """Raise unless ``ROCR_VISIBLE_DEVICES`` leaves every GPU of ``entries``, which ``said`` names."""
    below = _entries(environment, ROCR) if kind == "rocm" else None
    if below is not None and any(not entry.isdecimal() or int(entry) >= len(below) for entry in entries):
        raise Disagreement(_disagree(_shown(environment, ROCR), said))


def _shown(environment: Environment, variable: str) -> str:
    return f"{variable}={environment.get(variable, '')}"


def _disagree(one: str, other: str) -> str:
    return (
        f"{one} and {other} disagree: this process would compute on another GPU than Ray "
        f"assigned, or on none. Restrict a node by {CUDA} alone, before `ray start`"
    )
