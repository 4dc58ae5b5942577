"""Pure functions of the ``*_VISIBLE_DEVICES`` variables: visible GPUs, and the ordinal of Ray's GPU.

On CUDA one variable filters. On ROCm two layers do: ``ROCR_VISIBLE_DEVICES`` first, which renumbers the
remaining GPUs from 0; then, by the new numbers, ``HIP_VISIBLE_DEVICES``, or ``CUDA_VISIBLE_DEVICES`` where
HIP's is unset or empty. Each runtime reads its list in its own way; the rules and their sources are in
docs/amd.md, and tests compare these functions with a table of them.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Literal

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
NO_DEVICES = "NoDevFiles"  # some schedulers write it for an empty list
NO_GPU = "-1"
NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
ON = ("1", "true")  # as newer releases of Ray; older ones accept any text, even "0"

CANONICAL = re.compile(r"0|[1-9][0-9]*")
LEADING = re.compile(r"\+?([0-9]+)")
UUIDS = ("GPU-", "MIG-")
C_BASES = (("0x", 16), ("0", 8), ("", 10))

Kind = Literal["cuda", "rocm"]
Environment = Mapping[str, str]


class VisibleDevicesError(ValueError):
    """A variable is malformed, or contradicts another one or the GPU that Ray assigned."""


def visible_gpus(environment: Environment, kind: Kind, count: int) -> list[str]:
    """Return the physical GPUs that a process sees, in order of its ordinals; the machine has ``count``.

    A GPU is given by its number in the machine, or by the UUID that a variable contains, which is assumed to
    name a GPU. As in the runtimes, an entry that names no GPU ends the list.
    """
    names = [str(number) for number in range(count)]
    if kind == "rocm" and (below := _below(environment)) is not None:
        names = _select(below, names)
    variable = _restricting(environment, kind)
    if variable is None:
        return names
    value = environment[variable]
    return _select(_cuda_list(value) if kind == "cuda" else _hip_list(value), names)


def ordinal(assigned: str, environment: Environment, kind: Kind, variable: str = CUDA) -> int:
    """Return the ordinal in this process of the GPU that Ray calls ``assigned``.

    Ray names GPUs by the entries of ``variable``. The result is the same whether Ray set the variable for
    this process or a NOSET variable prevented that. Raises `VisibleDevicesError`, which names the two values
    that contradict each other.
    """
    source = f"GPU {assigned} of Ray"
    if kind == "rocm" and variable == ROCR and (below := _below(environment)) is not None:
        assigned = assigned.strip()
        if assigned not in below:
            raise VisibleDevicesError(_disagree(_shown(environment, ROCR), source))
        assigned = str(below.index(assigned))
    chosen = _restricting(environment, kind)
    if chosen is None:
        if not assigned.isdecimal():
            raise VisibleDevicesError(f"{source} is not a number, and no variable lists it")
        _check(environment, kind, [assigned], source)
        return int(assigned)
    entries = _assignable(environment, kind, chosen)
    name = assigned.strip() if kind == "cuda" else assigned  # HIP accepts no spaces
    if name in entries:
        return entries.index(name)
    by_ray = assigned in environment.get(variable, "").split(",")
    raise VisibleDevicesError(
        _disagree(_shown(environment, chosen), _shown(environment, variable) if by_ray else source)
    )


def node_ids(environment: Environment) -> list[str] | None:
    """Return the names of the GPUs that Ray may assign on a ROCm node, or None for all.

    The names are entries for ``CUDA_VISIBLE_DEVICES``, whichever variable restricts the node. Raises
    `VisibleDevicesError` if a variable is malformed, or if two contradict each other.
    """
    below = _below(environment)
    chosen = _restricting(environment, "rocm")
    if chosen is not None:
        return _assignable(environment, "rocm", chosen)
    if HIP in environment or CUDA in environment:
        return []  # HIP shows all GPUs then; Ray assigns none, as on CUDA
    return None if below is None else [str(number) for number in range(len(below))]


def environment_for(ids: Sequence[object], kind: Kind) -> dict[str, str]:
    """Return the variables with which a process sees exactly the GPUs ``ids`` of its node, in this order.

    HIP treats an empty list as no list, so on ROCm "-1", which names no GPU, is used instead.
    """
    value = ",".join(map(str, ids))
    return {CUDA: value} if kind == "cuda" else dict.fromkeys((CUDA, HIP), value or NO_GPU)


def noset_enabled(environment: Environment) -> bool:
    """Report whether Ray must not set ``CUDA_VISIBLE_DEVICES`` of its workers."""
    return environment.get(NOSET, "").lower() in ON


def _restricting(environment: Environment, kind: Kind) -> str | None:
    """Return the variable by which the CUDA or HIP runtime filters, if any."""
    if kind == "cuda":
        return CUDA if CUDA in environment else None
    return next((variable for variable in (HIP, CUDA) if environment.get(variable)), None)


def _cuda_list(value: str) -> list[str]:
    """Return the entries that CUDA accepts: numbers, or UUIDs if the first is one; none if one repeats."""
    entries = value.split(",")
    prefix = next((uuid for uuid in UUIDS if value.startswith(uuid)), None)
    if prefix:
        accepted = list(itertools.takewhile(lambda entry: entry.startswith(prefix), entries))
    else:
        numbers = itertools.takewhile(bool, (LEADING.match(entry.strip()) for entry in entries))
        accepted = [str(int(number[1])) for number in numbers if number]
    return accepted if len(set(accepted)) == len(accepted) else []


def _hip_list(value: str) -> list[str]:
    """Return the entries that HIP accepts: numbers without spaces and leading zeros, and UUIDs."""
    entries = value.removesuffix(",").split(",")
    accepted = itertools.takewhile(
        lambda entry: CANONICAL.fullmatch(entry) or entry.startswith(UUIDS[0]), entries
    )
    return list(dict.fromkeys(accepted))


def _below(environment: Environment) -> list[str] | None:
    """Return the entries that ROCR accepts, up to the first one that is repeated; None if it is unset."""
    if ROCR not in environment:
        return None
    accepted: list[str] = []
    for entry in map(str.strip, environment[ROCR].split(",")):
        name = entry if entry.upper().startswith(UUIDS[0]) else _c_number(entry)
        if name is None or name in accepted:
            break
        accepted.append(name)
    return accepted


def _c_number(text: str) -> str | None:
    """Return the number that C's strtol reads in base 0, in decimal; None if it is none or negative."""
    digits = text.removeprefix("+").lower()
    base = next(base for prefix, base in C_BASES if digits.startswith(prefix))
    try:
        return str(int(digits, base)) if digits[:1].isdecimal() and digits.isalnum() else None
    except ValueError:
        return None


def _assignable(environment: Environment, kind: Kind, variable: str) -> list[str]:
    """Return the GPUs that ``variable`` names; raise if HIP would ignore an entry, or if ROCR admits fewer.

    HIP accepts UUIDs since ROCm 6.2, but its documentation lists numbers alone.
    """
    if kind == "cuda":
        return _cuda_list(environment[variable])
    listed = environment[variable].removesuffix(",").split(",")
    entries = list(itertools.takewhile(lambda entry: entry not in (NO_DEVICES, NO_GPU), listed))
    for entry in entries:
        if not CANONICAL.fullmatch(entry):
            raise VisibleDevicesError(
                f"{_shown(environment, variable)}: {entry!r} is no GPU's number, and HIP ignores it and all "
                "that follow: list numbers, separated by commas without spaces"
            )
    _check(environment, kind, entries, _shown(environment, variable))
    return list(dict.fromkeys(entries))


def _select(entries: Sequence[str], names: Sequence[str]) -> list[str]:
    selected: list[str] = []
    for entry in entries:
        if not entry.isdecimal():
            selected.append(entry)
        elif int(entry) < len(names):
            selected.append(names[int(entry)])
        else:
            break
    return selected


def _check(environment: Environment, kind: Kind, entries: Sequence[str], source: str) -> None:
    """Raise unless ``ROCR_VISIBLE_DEVICES`` admits every GPU of ``entries``, which ``source`` describes."""
    below = _below(environment) if kind == "rocm" else None
    if below is not None and any(int(entry) >= len(below) for entry in entries):
        raise VisibleDevicesError(_disagree(_shown(environment, ROCR), source))


def _shown(environment: Environment, variable: str) -> str:
    return f"{variable}={environment.get(variable, '')}"


def _disagree(one: str, other: str) -> str:
    return (
        f"{one} and {other} disagree: this process would compute on another GPU than Ray "
        f"assigned, or on none. Restrict a node by {CUDA} alone, before `ray start`"
    )
