"""The token that a Ray cluster asks of everyone, where that Ray knows it (2.52 and later)."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from rlhf_stack.errors import UserError

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
DEFAULT = Path(".ray", "auth_token")  # below the home directory
HOW = f"copy it to ~/{DEFAULT} of this machine, or start the container with -e {TOKEN}=..."


def is_known() -> bool:
    """Whether the Ray that is installed has tokens; not asked of Ray itself, whose import takes seconds."""
    from importlib.util import find_spec

    spec = find_spec("ray")
    return bool(
        spec and spec.origin and Path(spec.origin).with_name("_private").joinpath("authentication").is_dir()
    )


def path(environment: Mapping[str, str]) -> Path:
    """The file in which the token is."""
    return Path(environment.get(TOKEN_PATH) or Path(environment.get("HOME", "/"), DEFAULT))


def is_here(environment: Mapping[str, str]) -> bool:
    """Whether this machine has one."""
    return bool(environment.get(TOKEN)) or path(environment).is_file()


def ensure(environment: Mapping[str, str]) -> bool:
    """Whether a token had to be made: then it is in `path`, for its owner alone. `UserError` if that fails."""
    if is_here(environment):
        return False
    file = path(environment)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as opened:
            opened.write(secrets.token_hex(32))
    except OSError as error:
        raise UserError(
            f"no token can be written to {file} ({error.strerror}): set {TOKEN}, or {TOKEN_PATH} to a file"
        ) from None
    return True


def use(environment: Mapping[str, str]) -> dict[str, str]:
    """What a client of a cluster on this machine adds to its environment: the mode, if there is a token."""
    if MODE in environment or not is_known() or not is_here(environment):
        return {}
    return {MODE: "token"}
