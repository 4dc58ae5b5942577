"""Whether what a build needs from elsewhere than the index and Debian can be had, asked before it starts."""

import docker
import docker.errors

from scripts.errors import UserError
from scripts.locks import resolver
from scripts.matrix.load import Cell
from scripts.matrix.model import Source


def packages(cell: Cell) -> str:
    """The names of the sources of packages, for a sentence."""
    return " and ".join(source.name for source in cell.sources if source.requirement)


def require(cell: Cell, client: docker.DockerClient) -> None:
    """A `UserError` that names the first source of ``cell`` that this machine cannot have."""
    require_packages(cell)
    for source in cell.sources:
        if source.image and not _has_image(source.image, client):
            raise _problem(
                cell, source, f"the image {source.image} is not here, and its registry does not answer for it"
            )


def require_packages(cell: Cell) -> None:
    """The same for the sources that are packages, which a lock needs too."""
    for source in cell.sources:
        if source.requirement and not _has_package(cell, source.requirement):
            raise _problem(
                cell,
                source,
                f"neither the index nor the `find-links` of pip's configuration have {source.requirement}",
            )


def _problem(cell: Cell, source: Source, why: str) -> UserError:
    return UserError(
        f"{cell.id} cannot be made here without {source.name}, which {source.purpose}: {why}. "
        f"What stands in for this cell, for tests, can: python -m scripts build {cell.id} --stand-in"
    )


def _has_package(cell: Cell, requirement: str) -> bool:
    question = resolver.Question(
        name=cell.lock,
        requirements=f"{requirement}\n",
        python=cell.python,
        platform=resolver.platform(cell.base),
        exclude_newer=cell.exclude_newer,
        local=True,
        alone=True,
    )
    try:
        resolver.answer(question)
    except UserError:
        return False
    return True


def _has_image(name: str, client: docker.DockerClient) -> bool:
    try:
        client.images.get(name)
    except docker.errors.ImageNotFound:
        try:
            client.images.get_registry_data(name)
        except docker.errors.APIError:
            return False
    return True
