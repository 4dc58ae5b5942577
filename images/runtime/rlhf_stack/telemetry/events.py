"""Events of a run as JSON lines, one file per process in the directory RLHF_STACK_EVENTS; off if unset.

Each line has ``event``, ``time`` (unix seconds), ``host`` and ``pid``. One ``write`` to a file opened for
appending writes it, so that the lines of a process never mix.
"""

import functools
import json
import math
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_stack.config import env_vars
from rlhf_stack.lazy import ray
from rlhf_stack.telemetry import run_log, step_metrics, traces

END_BYTES, MOST_FILES = 1 << 18, 512  # of what `read_recent` reads

_with_step: dict[str, float] = {}


def emit(event: str, /, **fields: Any) -> None:
    """Append one event; ``fields`` are JSON values, of which NaN and infinity become null.

    A field with the name of one that each event has, such as a metric of a user's reward, is dropped.

    A full disk or a lost file system does not end the run: events are dropped, with one warning per process.
    """
    directory = os.environ.get(env_vars.EVENTS)
    if not directory:
        return
    try:
        _append(Path(directory), event, fields)
    except OSError as error:
        _warn_once(f"events are not recorded in {directory} ({env_vars.EVENTS}): {error}")


@functools.cache
def _warn_once(text: str) -> None:
    run_log.warning(text)


def _append(path: Path, event: str, fields: Mapping[str, Any]) -> None:
    host, pid = socket.gethostname(), os.getpid()
    own = {"event": event, "time": time.time(), "host": host, "pid": pid}
    line = own | _finite(fields) | own
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path / f"{host}-{pid}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, json.dumps(line, allow_nan=False).encode() + b"\n")
    finally:
        os.close(descriptor)


def read(directory: Path) -> list[dict[str, Any]]:
    """Return all events below ``directory``, oldest first, without lines that are incomplete or no events."""
    return _events(path.read_bytes() for _, path in sorted(_files(directory)))


def read_recent(directory: Path) -> list[dict[str, Any]]:
    """Return the first and the last events of the newest files below ``directory``, oldest first.

    The first ones name the engines; the memory and time that this takes do not grow with a run. A file that
    cannot be read, or that has vanished, has no events.
    """

    def ends(path: Path) -> bytes:
        with suppress(OSError):
            return _ends(path)
        return b""

    return _events(ends(path) for _, path in sorted(_files(directory))[-MOST_FILES:])


def _files(directory: Path) -> Iterator[tuple[float, Path]]:
    """The files of events below ``directory``, each with its last change; to open a pipe would wait."""
    for folder, _, names in os.walk(directory):
        for path in (Path(folder, name) for name in names if name.endswith(".jsonl")):
            with suppress(OSError):
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    yield status.st_mtime, path


def _ends(path: Path) -> bytes:
    """The first and the last `END_BYTES` of a file, in lines; a line that is cut is no event."""
    with path.open("rb") as file:
        first = file.read(2 * END_BYTES)
        size = file.seek(0, os.SEEK_END)
        if size <= len(first):
            return first
        file.seek(size - END_BYTES)
        return first[:END_BYTES] + b"\n" + file.read(END_BYTES).partition(b"\n")[2]


def _events(contents: Iterable[bytes]) -> list[dict[str, Any]]:
    found = []
    for content in contents:
        for line in content.split(b"\n")[:-1]:
            with suppress(ValueError, TypeError, RecursionError):  # ValueError: not JSON, or not UTF-8
                event = json.loads(line)
                is_event = isinstance(event, dict) and isinstance(event.get("event"), str)
                if is_event and math.isfinite(float(event.get("time", math.nan))):
                    found.append(event)
    return sorted(found, key=lambda event: float(event["time"]))


def phase(name: str) -> None:
    """Record the end of a phase: "started", "engine up", "models up", "trained", "saved"."""
    emit("phase", name=name)


def begin(name: str) -> None:
    """Record the beginning of a part of a training step: "generation", "sync". It may never end."""
    emit("begins", name=name)


def log_with_step(values: Mapping[str, float]) -> None:
    """Let upstream log ``values`` with the next training step of this process."""
    _with_step.update(values)


def step(number: int, logs: MutableMapping[str, Any]) -> None:
    """Record training step ``number`` (from 1): the numbers that upstream logs and the mean ``reward``.

    Upstream then logs ``logs``, to which the values of `log_with_step` are added.
    The seconds of its phases go to the histogram of `step_metrics` and to `traces`, also if events are off.
    """
    logs.update(_with_step)
    _with_step.clear()
    values = {
        name: float(value)
        for name, value in logs.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    step_metrics.observe(values)
    traces.record(number, values)
    reward = values.pop("rollout/reward_mean", values.get("reward"))
    emit("step", **(values | {"step": number, "reward": reward}))


def models_up(engines: Sequence[Any] | None, locate: Callable[[Any], Any | None] | None = None) -> None:
    """Record that all models are loaded, and the location of the workers of each engine.

    The workers are queried only if events are on. OpenRLHF 0.5 then waits for its engines before it trains.
    If engines can be lost, ``locate`` queries one, and returns None if it is.
    """
    answers: list[Any] = []
    if os.environ.get(env_vars.EVENTS) and engines:
        if locate:
            answers = [locate(engine) for engine in engines]
        else:
            asked = [engine.where.remote() for engine in engines]
            answers = ray.get(asked, timeout=env_vars.engine_timeout())
    phase("models up")
    for index, ranks in enumerate(answers):
        if ranks is None:
            continue
        nodes = {rank["node_id"] for rank in ranks}
        emit("engine", engine=index, ranks=ranks, straddles=len(nodes) > 1)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
