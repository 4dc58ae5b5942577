"""The README's table of cells."""

import pytest

from scripts import catalogue
from scripts.matrix import expand, load
from scripts.problem import Problem

CELLS = expand(load())


def test_table_has_a_row_a_cell_with_all_that_was_not_shown() -> None:
    """A reader learns from it what was left untested."""
    lines = catalogue.table(CELLS).splitlines()[2:]
    assert len(lines) == len(CELLS)
    for line, cell in zip(lines, CELLS, strict=True):
        assert f"`{cell.id}`" in line
        assert cell.tested.not_shown in line
        assert line.count(" | ") == len(catalogue.COLUMNS) - 1


def test_filling_twice_changes_nothing_and_keeps_the_rest() -> None:
    """The text around the markers is a person's."""
    text = f"before\n{catalogue.BEGIN}\nold\n{catalogue.END}\nafter\n"
    once = catalogue.filled(text, CELLS)
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "old" not in once
    assert catalogue.filled(once, CELLS) == once


def test_lost_markers_are_said() -> None:
    """Rather than a table at the end of the file."""
    with pytest.raises(Problem, match=r"README\.md: expected the lines"):
        catalogue.filled("no markers", CELLS)
