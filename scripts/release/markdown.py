"""A table in Markdown."""

from collections.abc import Iterable, Sequence


def table_of(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The lines of a table; what would end a field is escaped."""
    lines = [header, ("---",) * len(header), *rows]
    return "".join(
        f"| {' | '.join(field.replace('|', chr(92) + '|') for field in line)} |\n" for line in lines
    )
