"""HTTP to the machines of a cluster without the proxy of the environment, which cannot reach them."""

import os
import urllib.request
from typing import Any
from urllib.parse import urlsplit

NAMES = ("no_proxy", "NO_PROXY")  # the first one that is set counts, for urllib and requests
HERE = ("127.0.0.1", "localhost")
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_directly(url: str, seconds: float) -> Any:
    """Return the answer to a request as ``urlopen`` does, with its errors."""
    return _OPENER.open(url, timeout=seconds)


def exclude_from_proxy(address: str) -> None:
    """Let this process, and those that it starts, use no proxy for this machine and that of ``address``.

    For clients that read the environment at each request, as Ray's does.
    """
    present = next(filter(None, map(os.environ.get, NAMES)), "")
    host = urlsplit(address if "//" in address else f"//{address}").hostname
    missing = [name for name in dict.fromkeys((*HERE, host)) if name and name not in present.split(",")]
    if missing and present.strip() != "*":  # with another name "*" would be no wildcard
        os.environ.update(dict.fromkeys(NAMES, ",".join(filter(None, [present, *missing]))))
