"""Flags of published scripts that a later OpenRLHF replaced, with their successors."""

from collections.abc import Mapping

LEVEL, MODE = "--algo.advantage.is_correction_level", "--algo.advantage.is_correction_mode"
# OpenRLHF 0.11.2 describes its schemes by level and mode: "tis" was the default of 0.11.0.
SUCCESSORS: Mapping[str, str] = {
    "--algo.advantage.is_correction_enable": f"{LEVEL} token {MODE} clip",
    "--algo.advantage.is_correction_type tis": f"{LEVEL} token {MODE} clip",
    "--algo.advantage.is_correction_type icepop": f"{LEVEL} token {MODE} mask",
    "--algo.advantage.is_correction_type seq-mask-tis": f"{LEVEL} seq {MODE} mask",
}


def hint(message: str) -> str:
    """The successors of the flags that ``message``, an error of the parser, names; "" if it names none.

    If a flag and its value were replaced, the same flag without a value is not mentioned.
    """
    words = f"{message.replace('=', ' ')} "
    found = [old for old in SUCCESSORS if f"{old} " in words]
    most_specific = next((old for old in found if " " in old), found[0] if found else "")
    return f"instead of {' and '.join(found)} use {SUCCESSORS[most_specific]}" if found else ""
