"""The space that a build needs follows from the size budget of its cell."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from docker.errors import ImageNotFound

from scripts.docker.client import check_space
from scripts.errors import UserError
from scripts.images import build
from scripts.locks import index_config, preflight
from scripts.matrix.load import Cell, expand, find, load

CELLS = expand(load())
DEFAULT = find(load(), load().default)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_an_image_and_the_cache_of_its_packages_fit(cell: Cell) -> None:
    """An image of 12 GB needs more than one of 2 GB; a rebuild needs its layers again, and no cache."""
    first, again = build.space(cell, exists=False), build.space(cell, exists=True)
    assert first.docker >= 2 * cell.size_budget_mb
    assert cell.size_budget_mb < again.docker < first.docker


def test_the_largest_image_needs_more_than_the_default_one() -> None:
    largest = max(CELLS, key=lambda cell: cell.size_budget_mb)
    assert build.space(largest, exists=False).docker > 3 * build.space(DEFAULT, exists=False).docker


@pytest.mark.parametrize("local", [ImageNotFound("no such image"), [MagicMock()]], ids=["first", "again"])
def test_a_build_without_space_is_refused_before_it_is_laid_out(
    monkeypatch: pytest.MonkeyPatch, local: Any
) -> None:
    asked = []

    def record(root: Path, megabytes: int, _: int) -> None:
        asked.append(megabytes)
        check_space(root, megabytes, free_bytes=0)

    monkeypatch.setattr(build, "connect", lambda: MagicMock(**{"images.get.side_effect": local}))
    monkeypatch.setattr(build, "check_space", record)
    monkeypatch.setattr(preflight, "require", lambda *_: None)
    monkeypatch.setattr(index_config, "load", MagicMock())
    monkeypatch.setattr(build, "collect", MagicMock(side_effect=AssertionError))
    needed = build.space(DEFAULT, exists=isinstance(local, list)).checkout
    with pytest.raises(UserError, match=f"this needs {needed} MB"):
        build.build(DEFAULT)
    assert asked == [needed]
