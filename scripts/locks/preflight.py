"""Check before a build that its inputs outside of the index and Debian's mirror are available."""

import docker
import docker.errors

from scripts.errors import UserError
from scripts.locks import resolver
from scripts.matrix.load import Cell
from scripts.matrix.model import Source


def packages(cell: Cell) -> str:
    """Return the names of the sources that are packages, joined for a sentence."""
    return " and ".join(source.name for source in cell.sources if source.requirement)


def require(cell: Cell, client: docker.DockerClient) -> None:
    """Raise `UserError` for the first source of ``cell`` that is unavailable on this machine."""
    require_packages(cell)
    for source in cell.sources:
        if source.image and not _has_image(source.image, client):
            raise _problem(
                cell,
                source,
                f"there is no local image {source.image}, and its registry does not provide it",
            )


def require_packages(cell: Cell) -> None:
    """Raise `UserError` for the first unavailable source that is a package; a lock needs these too."""
    for source in cell.sources:
        if source.requirement and not _has_package(cell, source.requirement):
            raise _problem(
                cell,
                source,
                f"neither the index nor the `find-links` of pip's configuration has {source.requirement}",
            )


def _problem(cell: Cell, source: Source, why: str) -> UserError:
    return UserError(
        f"{cell.id} cannot be built without {source.name}, which {source.purpose}: {why}. "
        f"Its stand-in for tests can be built: python -m scripts build {cell.id} --stand-in"
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
