"""OpenRLHF's own trainer on two containers: trainer ranks on both, and equal weights in every engine."""

import pytest
from docker.models.images import Image
from rich.console import Console
from rlhf_stack.demo import tiny_run

from scripts.matrix.load import Cell
from scripts.testing import demo

STEPS = 3


@pytest.mark.timeout(900)
def test_a_layout_over_both_nodes_trains(cell: Cell, image: Image) -> None:
    """Trainer ranks on two nodes, with the engines on the same GPUs if this OpenRLHF supports it."""
    layout = next(
        name for name in tiny_run.installed(cell.versions["openrlhf"]).layouts if name != "separate"
    )
    display = demo.Display(Console())
    result = demo.train_on_nodes(cell, str(image.id), layout, STEPS, seed=0, timeout=800, display=display)
    assert result["steps"] == STEPS
    assert not any(engine["straddles"] for engine in result["engines"])
    assert len({engine["node"] for engine in result["engines"]}) == len(result["engines"])
    assert result["weights_equal"] is True
    assert result["parameters_compared"] > 0
