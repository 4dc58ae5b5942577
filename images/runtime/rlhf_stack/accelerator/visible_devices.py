"""Pure functions of the ``*_VISIBLE_DEVICES`` variables: visible GPUs, and the ordinal of Ray's GPU.

On CUDA one variable filters. On ROCm two layers do: ``ROCR_VISIBLE_DEVICES`` first, which renumbers the
remaining GPUs from 0; then, by the new numbers, ``HIP_VISIBLE_DEVICES``, or ``CUDA_VISIBLE_DEVICES`` where
HIP's is unset or empty. Sources: AMD's page on GPU isolation (ROCm 6.1), Device::init of ROCm/clr,
pytorch#142292.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
NO_DEVICES = "NoDevFiles"  # some schedulers write it for an empty list
NO_GPU = "-1"
NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
ON = ("1", "true")  # as newer releases of Ray; older ones accept any text, even "0"

Kind = Literal["cuda", "rocm"]
Environment = Mapping[str, str]


class VisibleDevicesError(ValueError):
    """Two variables, or a variable and the GPU that Ray assigned, contradict each other."""


def visible_gpus(environment: Environment, kind: Kind, count: int) -> list[str]:
    """Return the physical GPUs that a process sees, in order of its ordinals; the machine has ``count``.

    A GPU is given by its number in the machine, or by the UUID that a variable contains. As in the runtimes,
    an entry that names no GPU ends the list, and a repeated entry counts once.
    """
    names = [str(number) for number in range(count)]
    if kind == "rocm" and (below := _entries(environment, ROCR)) is not None:
        names = _select(below, names)
    variable = _restricting(environment, kind)
    return names if variable is None else _select(_entries(environment, variable) or [], names)


def ordinal(assigned: str, environment: Environment, kind: Kind, variable: str = CUDA) -> int:
    """Return the ordinal in this process of the GPU that Ray calls ``assigned``.

    Ray names GPUs by the entries of ``variable``. The result is the same whether Ray set the variable for
    this process or a NOSET variable prevented that. Raises `VisibleDevicesError`, which names the two values
    that contradict each other.
    """
    source = f"GPU {assigned} of Ray"
    if kind == "rocm" and variable == ROCR and (below := _entries(environment, ROCR)) is not None:
        if assigned not in below:
            raise VisibleDevicesError(_disagree(_shown(environment, ROCR), source))
        assigned = str(below.index(assigned))
    chosen = _restricting(environment, kind)
    if chosen is None:
        if not assigned.isdecimal():
            raise VisibleDevicesError(f"{source} is not a number, and no variable lists it")
        _check(environment, kind, [assigned], source)
        return int(assigned)
    entries = _entries(environment, chosen) or []
    _check(environment, kind, entries, _shown(environment, chosen))
    if assigned in entries:
        return entries.index(assigned)
    by_ray = assigned in (_entries(environment, variable) or [])
    raise VisibleDevicesError(
        _disagree(_shown(environment, chosen), _shown(environment, variable) if by_ray else source)
    )


def node_ids(environment: Environment) -> list[str] | None:
    """Return the names of the GPUs that Ray may assign on a ROCm node, or None for all.

    The names are entries for ``CUDA_VISIBLE_DEVICES``, whichever variable restricts the node.
    """
    below = _entries(environment, ROCR)
    chosen = _restricting(environment, "rocm")
    if chosen is None and (HIP in environment or CUDA in environment):
        return []  # HIP shows all GPUs then; Ray assigns none, as on CUDA
    if chosen is None:
        return None if below is None else [str(number) for number in range(len(below))]
    entries = _entries(environment, chosen) or []
    _check(environment, "rocm", entries, _shown(environment, chosen))
    return entries


def environment_for(ids: Sequence[object], kind: Kind) -> dict[str, str]:
    """Return the variables with which a process sees exactly the GPUs ``ids`` of its node, in this order.

    HIP treats an empty list as no list, so on ROCm "-1", which names no GPU, is used instead.
    """
    value = ",".join(map(str, ids))
    return {CUDA: value} if kind == "cuda" else dict.fromkeys((CUDA, HIP), value or NO_GPU)


def noset_enabled(environment: Environment) -> bool:
    """Report whether Ray must not set ``CUDA_VISIBLE_DEVICES`` of its workers."""
    return environment.get(NOSET, "").lower() in ON


def _entries(environment: Environment, variable: str) -> list[str] | None:
    """Return the distinct entries of a variable up to a "-1"; None if the variable is unset."""
    value = environment.get(variable)
    if value is None:
        return None
    named = itertools.takewhile(lambda entry: entry not in ("", NO_DEVICES, NO_GPU), _split(value))
    return list(dict.fromkeys(named))


def _split(value: str) -> list[str]:
    return [entry.strip() for entry in value.split(",")]


def _restricting(environment: Environment, kind: Kind) -> str | None:
    """Return the variable by which the CUDA or HIP runtime filters, if any."""
    if kind == "cuda":
        return CUDA if CUDA in environment else None
    return next((variable for variable in (HIP, CUDA) if environment.get(variable)), None)


def _select(entries: Sequence[str], names: Sequence[str]) -> list[str]:
    selected: dict[str, None] = {}
    for entry in entries:
        if entry.isdecimal() and int(entry) < len(names):
            selected[names[int(entry)]] = None
        elif entry.startswith(("GPU-", "MIG-")):
            selected[entry] = None
        else:
            break
    return list(selected)


def _check(environment: Environment, kind: Kind, entries: Sequence[str], source: str) -> None:
    """Raise unless ``ROCR_VISIBLE_DEVICES`` admits every GPU of ``entries``, which ``source`` describes."""
    below = _entries(environment, ROCR) if kind == "rocm" else None
    if below is not None and any(not entry.isdecimal() or int(entry) >= len(below) for entry in entries):
        raise VisibleDevicesError(_disagree(_shown(environment, ROCR), source))


def _shown(environment: Environment, variable: str) -> str:
    return f"{variable}={environment.get(variable, '')}"


def _disagree(one: str, other: str) -> str:
    return (
        f"{one} and {other} disagree: this process would compute on another GPU than Ray "
        f"assigned, or on none. Restrict a node by {CUDA} alone, before `ray start`"
    )
