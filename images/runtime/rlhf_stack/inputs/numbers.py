"""Numbers and sizes of users, in ASCII digits, finite and within stated limits."""

import re

from rlhf_stack.errors import UserError
from rlhf_stack.inputs.text import shortened

NODES, GPUS = 100_000, 1_000_000  # the largest cluster that is planned
GPUS_PER_NODE, CPUS_PER_NODE = 1024, 100_000
SECONDS = 31_536_000  # a year
GIB = 1 << 30
BYTES = 1 << 60
GPU_MEMORY, HOST_MEMORY = (GIB, 4 << 40), (GIB, 1 << 50)
# No leading zeros: 010 is 8 in YAML and in C, and 10 elsewhere.
WHOLE = re.compile(r"[+-]?(?:0|[1-9][0-9]{0,29})")
DECIMAL = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
SIZE = re.compile(rf"({DECIMAL.pattern})\s*([A-Za-z]*)")
UNITS = {"B": 1}
UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", 1)}
UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", 1)}
UNITS |= {f"{prefix}i": 1024**power for power, prefix in enumerate("KMGTP", 1)}  # of Kubernetes
BY_LOWER_CASE = {name.lower(): value for name, value in UNITS.items()}


def whole(text: str, least: int, most: int) -> int:
    """The whole number that ``text`` is; `UserError` unless it is from ``least`` to ``most``."""
    stripped = text.strip()
    if not WHOLE.fullmatch(stripped) or not least <= int(stripped) <= most:
        raise UserError(f"{_quoted(text)}: expected a whole number {_range(least, most)}")
    return int(stripped)


def decimal(text: str, least: float, most: float, above: bool = False) -> float:
    """The finite number that ``text`` is; `UserError` unless it is from ``least`` to ``most``.

    ``above``: it must be greater than ``least``.
    """
    stripped = text.strip()
    number = float(stripped) if DECIMAL.fullmatch(stripped) else float("nan")
    if not (least < number if above else least <= number) or not number <= most:
        expected = f"greater than {least:g}" if above else f"of at least {least:g}"
        limit = f" and at most {most:,.0f}" if most < BYTES else " and at most 10^18"
        raise UserError(f"{_quoted(text)}: expected a number {expected}{limit}")
    return number


def size(
    text: str, unit: int = GIB, least: int = 0, most: int = BYTES, examples: str = "80, 80GiB or 80GB"
) -> int:
    """Bytes of a size such as 80, 80GiB or 80GB; a number without a unit counts ``unit`` bytes.

    `UserError`, with ``examples``, for another unit, and for sizes below ``least`` or above ``most``.
    """
    found = SIZE.fullmatch(text.strip())
    factor = (BY_LOWER_CASE.get(found[2].lower()) if found[2] else unit) if found else None
    if found and factor is None and f"{found[2]}b".lower() in BY_LOWER_CASE:
        raise UserError(
            f"{_quoted(text)}: {found[2]} is ambiguous: write {found[2].upper()}iB for powers of 1024, or "
            f"{found[2].upper()}B for powers of 1000"
        )
    amount = float(found[1]) * factor if found and factor else -1.0
    if not least <= amount <= most:
        limits = f" from {_shown(least)} to {_shown(most)}" if least else ""
        raise UserError(f"{_quoted(text)}: expected a size{limits}, such as {examples}")
    return int(amount)


def _shown(amount: int) -> str:
    """A limit in its largest unit."""
    unit = max((value, name) for name, value in UNITS.items() if name.endswith("iB") and amount >= value)
    return f"{amount // unit[0]}{unit[1]}"


def _range(least: int, most: int) -> str:
    return f"of at least {least}" + (f" and at most {most:,}" if most < 10**18 else "")


def _quoted(text: str) -> str:
    return repr(shortened(text, 60))
