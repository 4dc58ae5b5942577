"""Text of users in messages: one line, without control characters, and of bounded length."""

import difflib
import re
from collections.abc import Iterable, Sequence

LONGEST_WORD, LONGEST_LINE = 200, 6000  # characters; a command line of OpenRLHF with its successors has 3000
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
NEAR = 0.75  # least similarity of a suggestion, of 1


def one_line(text: str) -> str:
    """``text`` in one line: control characters become spaces, long words and a long line are cut."""
    plain = "".join(
        char if char.isprintable() else " " for char in ESCAPES.sub("", text[: 10 * LONGEST_LINE])
    )
    line = " ".join(shortened(word) for word in plain.split())
    return line if len(line) <= LONGEST_LINE else line[:LONGEST_LINE] + "..."


def shortened(word: str, most: int = LONGEST_WORD) -> str:
    """``word``, without its middle if it has more than ``most`` characters."""
    return word if len(word) <= most else f"{word[: most // 2]}...{word[-most // 4 :]}"


def first_names(names: Sequence[str], most: int = 3) -> str:
    """The first names, at most ``most``, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def suggestion(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'plan'?`` if a known word is near ``word``, otherwise nothing."""
    found = difflib.get_close_matches(word[:LONGEST_WORD], sorted(known), 1, NEAR)
    return f"; did you mean {found[0]!r}?" if found else ""
