"""Check before a build that its inputs outside of the index and Debian's mirror are available."""

import functools
import sys

import docker
import docker.errors

from scripts.errors import UserError
from scripts.locks import lockfile, resolver
from scripts.matrix.load import Cell, Matrix, find
from scripts.matrix.model import PLAIN_INDEX, Source


def packages(cell: Cell) -> str:
    """Return the names of the sources that are packages, joined for a sentence."""
    return " and ".join(source.name for source in cell.sources if source.requirement)


def require(cell: Cell, client: docker.DockerClient) -> None:
    """Raise `UserError` for the first input of a build that is unavailable: a locked wheel or a source."""
    if lacking := missing_wheel(cell):
        raise UserError(
            f"{cell.id} cannot be built: {_reason(cell, lacking)}, or build the larger {cell.id}{PLAIN_INDEX}"
        )
    _require_package_sources(cell)
    for source in cell.sources:
        if source.image and not _has_image(source.image, client):
            raise _problem(
                cell, source, f"there is no local image {source.image}, and its registry does not provide it"
            )


def require_for_lock(cell: Cell) -> None:
    """Raise `UserError` for the first package that the resolver of locks does not find on this machine."""
    _require_package_sources(cell)
    for package in cell.packages:
        if "+" in package.requirement and not _has_package(cell, package.requirement):
            raise UserError(
                f"{cell.id} cannot be locked: neither the index nor `find-links` of pip's configuration has "
                f"{package.requirement}. Run `pip config set global.find-links FOLDER` with its folder"
            )


def _require_package_sources(cell: Cell) -> None:
    for source in cell.sources:
        if source.requirement and not _has_package(cell, source.requirement):
            raise _problem(
                cell,
                source,
                f"neither the index nor the `find-links` of pip's configuration has {source.requirement}",
            )


def missing_wheel(cell: Cell) -> str | None:
    """Return the first pin with a local version that pip's configuration does not find, or None."""
    lock = lockfile.path(cell)
    if not cell.plain_index or not lock.exists():
        return None
    local = (item for item in lockfile.parse(lock.read_text(encoding="utf-8")) if "+" in item.version)
    found = functools.partial(_finds, python=cell.python, platform=resolver.platform(cell.base))
    return next((f"{item.name}=={item.version}" for item in local if not found(item.block)), None)


def default_cell(matrix: Matrix) -> Cell:
    """Return the default cell, or its stand-in from the plain index where the cell cannot be built."""
    cell = find(matrix, matrix.default)
    lacking = missing_wheel(cell)
    if lacking is None:
        return cell
    print(f"using {cell.id}{PLAIN_INDEX}, a larger image: {_reason(cell, lacking)}", file=sys.stderr)
    return find(matrix, cell.id + PLAIN_INDEX)


_finds = functools.cache(resolver.finds)


def _reason(cell: Cell, wheel: str) -> str:
    where = cell.plain_index.wheels if cell.plain_index else "an index that has it"
    return (
        f"pip's configuration does not find {wheel}. Run `pip config set global.extra-index-url URL` with "
        f"the address of {where}, or `pip config set global.find-links FOLDER` with the wheel's folder"
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
    except UserError as error:
        if resolver.UNRESOLVED not in str(error):
            raise
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
