"""Which Docker Engine the user chose: by ``DOCKER_HOST``, or by Docker's current context."""

from collections.abc import Mapping
from typing import NamedTuple

from docker.context import ContextAPI
from docker.context.config import get_current_context_name

from scripts.errors import UserError


class Endpoint(NamedTuple):
    """A Docker Engine that is not this machine's default: its address, its choice and how to undo that."""

    address: str
    choice: str
    undo: str


def chosen(environment: Mapping[str, str]) -> Endpoint | None:
    """The Docker Engine that the user chose, as Docker's command does; None for this machine's default.

    A `UserError` reports a context that does not exist or cannot be read.
    """
    if host := environment.get("DOCKER_HOST"):
        return Endpoint(host, f"DOCKER_HOST={host}", "unset DOCKER_HOST")
    by_variable = environment.get("DOCKER_CONTEXT")
    name = by_variable or get_current_context_name()
    if name == "default":
        return None
    undo = "unset DOCKER_CONTEXT" if by_variable else "docker context use default"
    try:
        context = ContextAPI.get_context(name)
    except Exception as error:  # the SDK raises whatever a damaged file leads to
        raise UserError(
            f"Docker's context {name!r} cannot be read ({error}): correct it, or `{undo}`"
        ) from None
    if context is None or not context.Host:
        raise UserError(f"Docker's context {name!r} does not exist: create it, or `{undo}`")
    return Endpoint(context.Host, f"Docker's context {name!r} ({context.Host})", undo)
