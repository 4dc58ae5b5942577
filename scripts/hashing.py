"""The one digest that this repository uses."""

import hashlib


def sha256(content: bytes | str) -> str:
    """The SHA-256 of ``content`` as 64 hexadecimal digits; text is encoded as UTF-8."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()
