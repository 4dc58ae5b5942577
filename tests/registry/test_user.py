"""A user's work with a published image: pull it by its digest, and build FROM it."""

import os
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import docker.errors
import pytest
from docker.models.images import Image
from rich.console import Console

from scripts.docker.client import build_environment, docker_command
from scripts.images.build import write_secrets
from scripts.locks import index_config
from scripts.matrix.load import Cell
from scripts.paths import ROOT
from scripts.release import publish
from scripts.testing import in_image
from tests.registry.images import remove

EXAMPLE = ROOT / "images" / "examples" / "Dockerfile"
Build = Callable[..., subprocess.CompletedProcess[str]]


def pip_list(client: docker.DockerClient, image: str) -> set[str]:
    """Return the packages that pip lists in an image, as ``name==version``."""
    output = client.containers.run(image, ["pip", "list", "--format=freeze"], remove=True)
    return set(output.decode().split())


@pytest.mark.timeout(1800)
def test_an_image_pulled_by_its_digest_passes_the_image_tests(
    client: docker.DockerClient, cell: Cell, image: Image, repo: str
) -> None:
    """The image is pushed, deleted locally, and pulled again; its local names are restored.

    The builder may have cached its layers: test_publish shows that every byte can come from the registry.
    """
    running = client.containers.list(filters={"ancestor": str(image.id)})
    assert not running, "containers of this image are running, such as those of another suite: end them first"
    tags = image.tags
    immutable, _ = publish.publish(client, repo, [publish.Item(cell, image)], Console())
    remove(client, str(image.id))
    with pytest.raises(docker.errors.ImageNotFound):
        client.images.get(str(image.id))
    pulled = client.images.pull(repo, tag=immutable.digest)
    for tag in tags:
        pulled.tag(*tag.rsplit(":", 1))
    try:
        assert pulled.id == image.id
        run = in_image.Run("image", str(pulled.id), f"{repo}@{immutable.digest}", again=True)
        assert in_image.run_all(client, cell, run) == 0
    finally:
        client.images.remove(f"{repo}@{immutable.digest}", noprune=True)


@pytest.fixture
def built(client: docker.DockerClient, cell: Cell) -> Iterator[Build]:
    """Return a function that builds the example FROM the cell; the images are removed after the test."""
    tags = []

    def build(tag: str, packages: str | None, with_secrets: bool) -> subprocess.CompletedProcess[str]:
        tags.append(tag)
        with tempfile.TemporaryDirectory() as folder:
            secrets = write_secrets(index_config.load(), Path(folder)) if with_secrets else {}
            (Path(folder) / "context").mkdir()
            command = [
                *docker_command(),
                "build",
                "--progress=plain",
                f"--file={EXAMPLE}",
                f"--tag={tag}",
                f"--build-arg=BASE={cell.tag}",
                *([f"--build-arg=PACKAGES={packages}"] if packages else []),
                *(f"--secret=id={name},src={path}" for name, path in secrets.items()),
                str(Path(folder) / "context"),
            ]
            environment = build_environment(os.environ)
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=600
            )

    yield build
    for tag in tags:
        remove(client, tag)


@pytest.mark.timeout(1800)
def test_an_image_built_from_ours_passes_the_tests_of_its_parent(
    client: docker.DockerClient, cell: Cell, image: Image, built: Build
) -> None:
    """The derived image has one more package, the same pins and the same user."""
    tag = f"rlhf-stacks-tests:{uuid.uuid4().hex}"
    done = built(tag, None, with_secrets=True)
    assert done.returncode == 0, done.stderr[-3000:]
    derived = client.images.get(tag)
    assert derived.attrs["Config"]["User"] == image.attrs["Config"]["User"] == "1000"
    before, after = pip_list(client, cell.tag), pip_list(client, tag)
    assert before < after
    assert [line.partition("==")[0] for line in after - before] == ["humanize"]
    run = in_image.Run("image", str(derived.id), f"an image built FROM {cell.tag}", derived=True)
    assert in_image.run_all(client, cell, run) == 0


@pytest.mark.timeout(600)
def test_a_package_that_moves_a_pin_fails_the_build(cell: Cell, built: Build) -> None:
    """The build has no secrets, as for most users."""
    done = built(f"rlhf-stacks-tests:{uuid.uuid4().hex}", "ray==2.8.0", with_secrets=False)
    assert done.returncode != 0
    assert (
        "Cannot install ray==2.8.0 because these package versions have conflicting dependencies"
        in done.stderr
    )
    assert f"The user requested (constraint) ray=={cell.versions['ray']}" in done.stderr
