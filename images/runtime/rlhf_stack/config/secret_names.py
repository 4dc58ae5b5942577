"""Recognises secrets among environment variables, by name and by value."""

import re
from collections.abc import Mapping

WORDS = {
    *("TOKENS", "SECRETS", "KEY", "KEYS", "AUTH", "AUTHORIZATION", "BEARER", "PAT"),
    *("CREDENTIAL", "CREDENTIALS", "CREDS", "COOKIE"),
}
# Of a word, such as PGPASSWORD. KEY is none, because of MONKEY.
ENDINGS = (
    *("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "PASS", "PWD"),
    *("APIKEY", "ACCESSKEY", "SECRETKEY", "PRIVATEKEY"),
)
OTHER_ENDINGS = (
    *("BYPASS", "COMPASS", "OVERPASS", "UNDERPASS", "SURPASS", "TRESPASS"),
    *("LOWPASS", "HIGHPASS", "BANDPASS"),
)
# Before KEY or TOKEN of a flag: only these are keys that are secret; these are tokens of a model.
SECRET_KEYS = ("API", "ACCESS", "SECRET", "PRIVATE", "AUTH", "WANDB")
MODEL_TOKENS = (
    *("BOS", "EOS", "PAD", "UNK", "CLS", "SEP", "MASK", "STOP", "START", "END", "SPECIAL", "PLACEHOLDER"),
    *("IMAGE", "VIDEO", "AUDIO", "VISION"),
)
ALONE = ("PWD", "OLDPWD", "RAY_AUTH_MODE", "SSH_AUTH_SOCK")  # names that look like one and are none
# In a URL also a user alone, which may be a token; without a scheme (proxies may have none) both.
USER_INFO = re.compile(r"(?:(?<=://)(?!git@)[^/\s]+|^[^/\s:@]+:[^/\s]+)(?=@(?!sha256:))")
SIGNATURE = re.compile(
    r"([?&](?:[\w-]*[_-])?(?:signature|sig|credential|token|key|apikey|password|secret)=)[^&\s]+",
    re.IGNORECASE,
)


def is_secret(name: str, value: str = "") -> bool:
    """Report whether a variable is a secret: by a word of its name, or by a password in its value."""
    words = re.split("[^A-Z0-9]+", name.upper())
    by_name = any(
        word in WORDS or (word.endswith(ENDINGS) and not word.endswith(OTHER_ENDINGS)) for word in words
    )
    return name not in ALONE and (by_name or has_password(value))


def is_secret_flag(flag: str) -> bool:
    """Report whether the value of ``flag``, such as --hf_token, is a secret."""
    *_, before, last = re.split("[^A-Z0-9]+", flag.upper())
    if last == "KEY":
        return before in SECRET_KEYS
    is_named = last.endswith(ENDINGS) and not last.endswith(OTHER_ENDINGS)
    return flag == "--use_wandb" or (is_named and not (last == "TOKEN" and before in MODEL_TOKENS))


def has_password(value: str) -> bool:
    """Report whether ``value`` has a URL with a user, a password or a signature."""
    return bool(USER_INFO.search(value) or SIGNATURE.search(value))


def without_passwords(variables: Mapping[str, str]) -> dict[str, str]:
    """``variables`` with the user, the password and the signature of each URL replaced."""
    return {name: SIGNATURE.sub(r"\1***", USER_INFO.sub("***", value)) for name, value in variables.items()}
