"""Every library with GPU code has code for each GPU that the cell promises, or the matrix says why not."""

import docker
import pytest
from docker.models.images import Image

from scripts.matrix.load import Cell
from scripts.release import architectures, measure


@pytest.mark.timeout(measure.SECONDS)
def test_every_library_has_code_for_the_promised_gpus(
    client: docker.DockerClient, image: Image, cell: Cell
) -> None:
    if cell.accelerator.kind == "cpu":
        pytest.skip("this image promises no GPU")
    libraries = measure.probe(client, image)["libraries"]
    assert not (lines := list(architectures.gaps(cell, libraries))), "\n".join(lines)
