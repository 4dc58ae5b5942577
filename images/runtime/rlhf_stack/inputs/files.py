"""Files of users: bounded in size and in time, also for pipes and devices, and decoded or refused."""

import io
import json
import math
import os
import select
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from rlhf_stack.errors import UserError
from rlhf_stack.inputs.text import one_line, shortened

PIPE_BYTES, CONFIG_BYTES, YAML_BYTES = 64 << 20, 4 << 20, 1 << 20  # YAML takes seconds for a MiB
IDLE_SECONDS = 30.0  # without data from a pipe
CHUNK = 1 << 20
DEEPEST = 100  # levels of nesting in YAML


def read_config(path: Path, most: int = CONFIG_BYTES, encoding: str = "utf-8-sig") -> str:
    """The text of a configuration file; `UserError` if it is no UTF-8 text of at most ``most`` bytes.

    A byte order mark is left out, unless ``encoding`` is utf-8.
    """
    try:
        return _content(path, most).decode(encoding)
    except UnicodeDecodeError:
        raise UserError(f"{_name(path)}: not UTF-8 text") from None


@contextmanager
def open_input(path: Path) -> Iterator[BinaryIO]:
    """Open a file of any size, or a pipe or device of at most 64 MiB; `UserError` if that fails."""
    try:
        opened = path.open("rb") if path.is_file() else io.BytesIO(_content(path, PIPE_BYTES))
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise UserError(f"{_name(path)}: {getattr(error, 'strerror', None) or error}") from None
    with opened:
        yield opened


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; `UserError` if it has none, or a number that is not finite."""
    return parse_json_object(read_config(path), _name(path))


def parse_json_object(text: str | bytes, name: str) -> dict[str, Any]:
    """The JSON object in ``text``, whose keys appear once; `UserError` names ``name``."""
    try:
        found = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique
        )
    except RecursionError:
        raise UserError(f"{name}: nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{name}: not JSON ({one_line(str(error))})") from None
    if not isinstance(found, dict):
        raise UserError(f"{name}: expected a JSON object, not {shortened(json.dumps(found), 60)}")
    return found


class NumberText(str):
    """A number of YAML as it was written: YAML 1.1 reads 010 as 8, 1_0 as 10, and 12:30 as 750."""

    __slots__ = ()


def read_yaml(path: Path) -> Any:
    """The content of a YAML file, whose numbers are `NumberText`.

    `UserError` if it is invalid or nested too deeply, or if a key appears twice.
    """
    import yaml

    loader = _strict_loader()
    text = read_config(path, YAML_BYTES)
    try:
        depth = 0
        for event in yaml.parse(text, loader):  # before loading, on which the stack of libyaml overflows
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise RecursionError
        return yaml.load(text, loader)  # noqa: S506  (a safe loader)
    except RecursionError:
        raise UserError(f"{_name(path)}: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date or number
        raise UserError(f"{_name(path)}: not YAML ({one_line(str(error))})") from None


def _strict_loader() -> Any:
    """A safe loader of YAML that does not interpret numbers, and refuses a key that appears twice."""
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            if isinstance(node, yaml.MappingNode):
                _unique([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return super().construct_mapping(node, deep)

    def number(loader: Any, node: Any) -> NumberText:
        return NumberText(loader.construct_scalar(node))

    for kind in ("int", "float"):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", number)
    return Loader


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of a key and a value as a dictionary; `ValueError` if a key appears twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{shortened(repr(twice), 60)} appears twice")
    return found


def require_writable(path: Path) -> None:
    """Raise `UserError` unless a file can be written at ``path``, which is not changed."""
    folder = path.parent
    if path.is_dir():
        raise UserError(f"{_name(path)}: is a directory")
    if path.exists() and not path.is_file():  # to open a pipe would wait for its reader
        raise UserError(f"{_name(path)}: is not a regular file")
    if not folder.is_dir():
        raise UserError(f"{_name(path)}: the folder {_name(folder)} does not exist")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"{_name(path)}: Permission denied")


def _content(path: Path, most: int) -> bytes:
    """The content of a file, pipe or device; `UserError` above ``most`` bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as opened:
            content = _read(opened, path, most + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise UserError(f"{_name(path)}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > most:
        raise UserError(f"{_name(path)}: more than {most >> 20} MiB, which is the limit")
    return content


def _read(opened: Any, path: Path, most: int) -> bytes:
    parts: list[bytes] = []
    while (room := most - sum(map(len, parts))) > 0:
        if not select.select([opened], [], [], IDLE_SECONDS)[0]:
            raise UserError(f"{_name(path)}: no data for {IDLE_SECONDS:g} s: is its writer running?")
        part = opened.read(min(CHUNK, room))
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def _name(path: Path) -> str:
    return shortened(str(path))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{shortened(text, 60)} is out of range")
    return number
