"""Sha256 digests, in hex."""

import hashlib
from pathlib import Path


def sha256(content: str | bytes) -> str:
    """Return the sha256 of bytes, or of text as UTF-8."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file of any size."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
