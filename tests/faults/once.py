"""Results that several processes need and one of them computes."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from scripts.locking import exclusive_lock

Result = TypeVar("Result")


def once(folder: Path, kind: type[Result], compute: Callable[[], Result], activity: str) -> Result:
    """Return the result in ``folder``, JSON of type ``kind``; without a readable one, compute and write it.

    Another process that needs it meanwhile waits, and prints for which ``activity``.
    """
    file = folder / "result.json"
    with exclusive_lock(folder, activity):
        with suppress(FileNotFoundError, msgspec.DecodeError):
            return msgspec.json.decode(file.read_bytes(), type=kind)
        result = compute()
        file.write_bytes(msgspec.json.encode(result))
        return result
