"""The token that a Ray cluster requires of each client, with Ray 2.52 and later."""

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from rlhf_stack.compat import ray_private
from rlhf_stack.errors import UserError
from rlhf_stack.inputs.files import read_config

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
DEFAULT = Path(".ray", "auth_token")  # below the home directory
LEAST_LENGTH = 32  # characters
VALID = re.compile(r"[\x21-\x7e]*")
ADVICE = "remove it, and `rlhf-stack start --head` creates one; or make one with `openssl rand -hex 32`"
REMEDY = f"copy it to ~/{DEFAULT} of this machine, or start the container with -e {TOKEN}=..."


def is_supported() -> bool:
    """Report whether the installed Ray supports tokens."""
    return ray_private.has_token_authentication()


def path(environment: Mapping[str, str]) -> Path:
    """Return the file of the token."""
    return Path(environment.get(TOKEN_PATH) or Path(environment.get("HOME", "/"), DEFAULT))


def is_available(environment: Mapping[str, str]) -> bool:
    """Report whether this machine has a token; `UserError` if it has one that is unusable."""
    if not _is_given(environment):
        return False
    file = path(environment)
    if TOKEN in environment:
        name, text = TOKEN, environment[TOKEN]
    elif not file.is_file():
        raise UserError(f"the token's path {file} is not a file: {ADVICE}")
    else:
        # Ray reads the bytes of the file, also a byte order mark.
        name, text = f"the token in {file}", read_config(file, encoding="utf-8")
    if problem := weakness(text):
        raise UserError(f"{name} {problem}: {ADVICE}")
    return True


def _is_given(environment: Mapping[str, str]) -> bool:
    return TOKEN in environment or path(environment).exists()


def weakness(token: str) -> str:
    """Why ``token`` cannot be used, such as "is empty"; "" if it can."""
    stripped = token.removesuffix("\n")
    if not stripped.strip():
        return "is empty"
    if not VALID.fullmatch(stripped):
        return "contains white space or other characters that an HTTP header cannot have"
    if len(stripped) < LEAST_LENGTH:
        return f"has {len(stripped)} characters, of which at least {LEAST_LENGTH} are required"
    return ""


def ensure(environment: Mapping[str, str]) -> bool:
    """Create the token in `path`, readable by its owner only, unless one is available.

    Returns whether it was created. Raises `UserError` if the file cannot be written.
    """
    if is_available(environment):
        return False
    file = path(environment)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as opened:
            opened.write(secrets.token_hex(32))
    except OSError as error:
        raise UserError(
            f"cannot write the token to {file} ({error.strerror}): set {TOKEN}, or {TOKEN_PATH} to a file"
        ) from None
    return True


def client_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a client adds to its environment: the token mode, if this machine has a token."""
    if MODE in environment or not is_supported() or not _is_given(environment):
        return {}
    return {MODE: "token"}
