"""Recognises secrets among environment variables, by name and by value."""

import re
from collections.abc import Mapping

ENDINGS = (
    *("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "PASS", "PWD", "APIKEY", "KEY", "AUTH"),
    *("CREDENTIAL", "CREDENTIALS", "COOKIE", "KEYS", "TOKENS", "SECRETS"),
)
ALONE = ("PWD", "OLDPWD", "RAY_AUTH_MODE", "SSH_AUTH_SOCK")  # names that look like one and are none
USER_INFO = re.compile(r"(?<=://)[^/\s@]*:[^/\s@]*(?=@)")  # of a URL


def is_secret(name: str, value: str = "") -> bool:
    """Report whether a variable is a secret: by a word of its name, or by a URL with a password."""
    words = name.upper().split("_")
    return name not in ALONE and (any(word.endswith(ENDINGS) for word in words) or has_password(value))


def has_password(value: str) -> bool:
    """Report whether ``value`` has a URL with a password."""
    return USER_INFO.search(value) is not None


def without_passwords(variables: Mapping[str, str]) -> dict[str, str]:
    """``variables`` with the user and password of each URL replaced."""
    return {name: USER_INFO.sub("***", value) for name, value in variables.items()}
