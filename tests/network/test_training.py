"""OpenRLHF's own trainer on two containers: ZeRO across both, an engine on each, equal weights after it."""

import pytest
from rich.console import Console

from scripts import demo
from scripts.matrix import Cell

STEPS = 3


@pytest.mark.timeout(900)
def test_hybrid_layout_trains_across_nodes(cell: Cell) -> None:
    """Four trainer ranks on two nodes, colocated with two tensor-parallel engines that sleep meanwhile."""
    result = demo.demo(cell, layout="hybrid", steps=STEPS, seed=0, timeout=800, console=Console())
    assert result["steps"] == STEPS
    assert [engine["straddles"] for engine in result["engines"]] == [False, False]
    assert len({engine["node"] for engine in result["engines"]}) == 2
    assert result["weights_equal"] is True
    assert result["parameters_compared"] > 0
