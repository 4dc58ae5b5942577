"""Finds which process of a log failed first: its innermost exception, and its deepest frame worth reading.

Lines are read per process, as the logs of Ray, vLLM and torchrun mix them. An error about another process (a
lost peer, an actor that died) is a first failure only if the log has no other.
"""

import re
import signal
from dataclasses import dataclass, field, replace
from datetime import datetime

from rlhf_stack.known_bad.matching import COLOURS, PASSED_ON, PREFIX, REMOTE, SHOWN_CHARACTERS

ONLY, TIME, LINES, UNCLEAR = "only", "time", "lines", "unclear"
GAP = 200  # lines without an error: what is before them belongs to an earlier failure
ENDED = "worker ended: "
ENDED_BY_OTHERS = ("SIGTERM", "SIGINT")
SAME_MOMENT = 1.0  # seconds; vLLM's stamps have whole ones, and clocks of nodes differ
# What processes and loggers print before the text of a line.
HEAD = re.compile(
    r"(?:\((?:[^()]* )?pid=\d+[^()]*\)(?: |$)|\(raylet[^()]*\) |\[rank ?\d+\]: ?|stderr: ?|"
    r"\[?\d{4}-\d\d-\d\d[ T][\d:,.]+\]?\s|(?:ERROR|CRITICAL)\s+\d\d-\d\d [\d:]+ (?:\[[^\]]*\]|\S+\])(?: |$))*"
)
STAMP = re.compile(r"(?:\d{4}-|\b)(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
GLOG_STAMP = re.compile(r"[EFC](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?")
FRAME = re.compile(r'\s+File "([^"]+)", line (\d+),? in (\S+)')
EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Died|Timeout)(?::\s|$)")
AFTER_FRAMES = re.compile(r"[A-Za-z_][\w.]*(?::\s|$)")  # exceptions have any name
CHAINED = re.compile(r"The above exception was the direct cause|During handling of the above exception")
IGNORED = re.compile(r"Exception ignored in")
# A crash or an error outside Python.
NATIVE = re.compile(
    r"\bNCCL WARN |\*\*\* SIG[A-Z]+ received|^Fatal Python error: |^\s*what\(\):|Segmentation fault|^Killed$|"
    r"[CF] \d+ \d+\] .*Check failed|[Pp]roc \S+ died|Watchdog caught collective|core dumped|"
    r"^CUDA (?:error|failure)"
)
# What a process reports when another one is lost or late.
LOST = re.compile(
    r"ncclRemoteError|remote process exited|[Cc]onnection (?:reset|refused|closed|was closed|aborted)|"
    r"Connection(?:Reset|Refused|Closed|Aborted)?Error|Broken ?[Pp]ipe|socketProgress|recvValue failed|"
    r"Watchdog caught|Some NCCL operations have failed|communicator was aborted|^EOFError|NodeDiedError|"
    r"Proxy Service.* Failed to execute|[Cc]lient socket has|Timed out waiting|timed out after|TimeoutError|"
    r"ReadTimeout"
)
EXIT = re.compile(
    r"(?:exit ?code\s*[:=]?\s*|return code = |exited? with (?:code|status) )(-?\d{1,3})\b",
    re.IGNORECASE,
)
WORKER_EXIT = re.compile(
    r"Worker IP address: (\S+).*Worker PID: (\d+).*exit type: SYSTEM_ERROR.*?detail: (.*)"
)
ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):\s+\[\d+\]:\s+time\s*: (?P<time>\S+)\s+host\s*: (?P<host>\S+)\s+"
    r"rank\s*: (?P<rank>\d+)[^\n]*\s+exitcode\s*: (?P<code>-?\d{1,3}) \(pid: (?P<pid>\d+)\)"
)
PLUMBING = re.compile(
    r"(?:site|dist)-packages/(?!openrlhf/|vllm/|deepspeed/)|/lib(?:64)?/python3\.\d+/(?!(?:site|dist)-)|"
    r"^<|^python/ray/|\.pyx$"
)
SHORT = re.compile(r".*(?:(?:site|dist)-packages|_ray_pkg_\w+)/")
PID, RANK = re.compile(r"pid=(\d+)"), re.compile(r"\brank ?(\d+)", re.IGNORECASE)
NCCL_LINE = re.compile(r"(\S+):(\d+):\d+ \[\d+\]")


@dataclass(frozen=True)
class FirstError:
    """The first failure of a log, in its last group of errors.

    ``led_to``: the last of the exceptions that were raised from it. ``frame``: the deepest of OpenRLHF, vLLM,
    DeepSpeed or the user's code. ``order``: how it is known to be first: no other process has an error of
    its own ("only"), by "time" stamps, by the order of "lines", or not ("unclear"). ``same`` and ``later``:
    numbers of other processes with the same error, and of later errors of other processes. ``passed_on``: it
    is about another process, whose own error the log does not show. ``launcher``: what torchrun saw first.
    """

    line: int
    text: str
    origin: str = ""
    time: str = ""
    frame: str = ""
    led_to: str = ""
    order: str = ONLY
    same: int = 0
    later: int = 0
    passed_on: bool = False
    launcher: str = ""


@dataclass
class _Process:
    """What was read of the lines of a process: its frames since a traceback began, and how that began."""

    frames: list[tuple[str, str, str]] = field(default_factory=list)
    remote: str = ""
    stamp: str = ""
    chained: bool = False
    ignored: bool = False
    announced: bool = False  # the line before says that the next traceback is ignored
    last: int = 0  # index of its last error


def first_error(text: str, complete: bool = True) -> FirstError | None:
    """The first failure of the last group of errors in ``text``; None if there is none."""
    text = COLOURS.sub("", text)
    errors = _last_group(_errors(text))
    if not errors:
        return None
    starts: dict[str, FirstError] = {}
    for one in [one for one in errors if not one.passed_on] or errors:
        known = starts.setdefault(_identity(one), one)
        if known.text.startswith(ENDED):  # its own error says more
            starts[_identity(one)] = one
    first, order = _earliest(list(starts.values()))
    others = [one for one in errors if _identity(one) != _identity(first)]
    if any(one.passed_on and not first.passed_on and _is_before(one, first) for one in others):
        order = UNCLEAR
    return replace(
        first,
        line=first.line if complete else first.line - 2 - text.rstrip("\n").count("\n"),
        order=order,
        same=len({_identity(one) for one in others if _shape(one) == _shape(first)}),
        later=sum(not _is_before(one, first) for one in others),
        launcher=_launcher(text),
    )


def signal_of(code: int) -> str:
    """The name of the signal of a negative exit code, or of one above 128; empty if it is none."""
    try:
        return signal.Signals(-code if code < 0 else code - 128).name
    except ValueError:
        return ""


def _errors(text: str) -> list[FirstError]:
    """The errors of the text; of chained exceptions, the innermost."""
    processes: dict[str, _Process] = {}
    found: list[FirstError] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line or line.isspace():
            continue
        head = HEAD.match(line)
        body = line[head.end() if head else 0 :].rstrip()
        prefixes = ["".join(groups) for groups in PREFIX.findall(line[: len(line) - len(body)])]
        prefix = next((one for one in reversed(prefixes) if "pid=" in one), prefixes[-1] if prefixes else "")
        process = processes.setdefault(prefix, _Process())
        error = _of_line(process, prefix, number, line, body)
        if error and error.led_to and process.last < len(found):
            found[process.last] = replace(found[process.last], led_to=error.led_to)
        elif error:
            process.last = len(found)
            found.append(error)
    return found


def _of_line(process: _Process, prefix: str, number: int, line: str, body: str) -> FirstError | None:
    """Read a line of a process: the error that ends in it, with ``led_to`` if the one before led to it."""
    announced, process.announced = process.announced, bool(IGNORED.search(body))
    if CHAINED.search(body):
        process.chained = True
    elif remote := list(REMOTE.finditer(body)):
        process.remote, process.frames, process.stamp = " ".join(remote[-1].groups()), [], _stamp(line)
    elif "Traceback (most recent call last)" in body:
        process.ignored, process.frames = announced, []
        process.stamp = _stamp(line) or process.stamp
        process.remote = process.remote if process.chained else ""
    elif frame := FRAME.match(body):
        process.frames.append((frame[1], frame[2], frame[3]))
    elif EXCEPTION.match(body) or (process.frames and AFTER_FRAMES.match(body)):
        return _exception(process, prefix, number, line, body)
    elif dead := WORKER_EXIT.search(body):
        ended = f"{ENDED}{dead[3]}"[:SHOWN_CHARACTERS]
        stopped = any(name in ended for name in ENDED_BY_OTHERS)
        return FirstError(number, ended, f"pid={dead[2]}, ip={dead[1]}", _stamp(line), passed_on=stopped)
    elif NATIVE.search(body):
        lost = bool(LOST.search(body))
        shown = body.strip()[:SHOWN_CHARACTERS]
        return FirstError(number, shown, prefix or _native_origin(line), _stamp(line), passed_on=lost)
    elif found := EXIT.search(body):
        name = signal_of(int(found[1]))
        shown = body.strip()[:SHOWN_CHARACTERS] + (f" ({name})" if name else "")
        if name or "failed (exitcode" in body:  # as torchrun names a rank
            reported = not name or name in ENDED_BY_OTHERS
            return FirstError(number, shown, prefix, _stamp(line), passed_on=reported)
    return None


def _exception(process: _Process, prefix: str, number: int, line: str, body: str) -> FirstError | None:
    """The error of a line that ends a traceback, or that is an exception without one."""
    error = FirstError(
        number,
        body[:SHOWN_CHARACTERS],
        process.remote or prefix,
        _stamp(line) or process.stamp,
        _own_frame(process.frames),
        body[:SHOWN_CHARACTERS] if process.chained else "",
        passed_on=bool(PASSED_ON.search(body) or LOST.search(body)),
    )
    ignored = process.ignored
    process.frames, process.remote, process.stamp = [], "", ""
    process.chained = process.ignored = False
    return None if ignored else error


def _last_group(errors: list[FirstError]) -> list[FirstError]:
    start = max((i for i in range(1, len(errors)) if errors[i].line - errors[i - 1].line > GAP), default=0)
    return errors[start:]


def _earliest(starts: list[FirstError]) -> tuple[FirstError, str]:
    """The earliest of the first errors of each process, and how that is known."""
    by_time = sorted(starts, key=lambda one: (_seconds(one.time) or 0.0, one.line))
    if len(starts) == 1 or any(_seconds(one.time) is None for one in starts):
        return starts[0], ONLY if len(starts) == 1 else LINES
    one, two = (_seconds(error.time) or 0.0 for error in by_time[:2])
    return by_time[0], TIME if two - one > SAME_MOMENT else UNCLEAR


def _is_before(one: FirstError, other: FirstError) -> bool:
    begun, ended = _seconds(one.time), _seconds(other.time)
    if begun is None or ended is None or begun == ended:
        return one.line < other.line
    return begun < ended


def _identity(error: FirstError) -> str:
    found = PID.search(error.origin)
    return found[1] if found else error.origin


def _shape(error: FirstError) -> str:
    return re.sub(r"0x[0-9a-f]+|\d+", "N", error.text)


def _native_origin(line: str) -> str:
    host, rank = NCCL_LINE.match(line), RANK.search(line)
    return f"{host[1]} pid={host[2]}" if host else f"rank {rank[1]}" if rank else ""


def _own_frame(frames: list[tuple[str, str, str]]) -> str:
    """The deepest frame of OpenRLHF, vLLM, DeepSpeed or the user's own code."""
    own = [frame for frame in frames if not PLUMBING.search(frame[0])]
    if not own:
        return ""
    path, line, name = own[-1]
    return f"{SHORT.sub('', path)}:{line} in {name}"


def _stamp(line: str) -> str:
    found = STAMP.search(line[:SHOWN_CHARACTERS]) or GLOG_STAMP.search(line[:SHOWN_CHARACTERS])
    return found[0] if found else ""


def _seconds(stamp: str) -> float | None:
    """The seconds of a time stamp, comparable within a year; None without a valid one."""
    found = STAMP.match(stamp) or GLOG_STAMP.match(stamp)
    if not found:
        return None
    month, day, hour, minute, second = (int(part) for part in found.groups()[:5])
    try:
        begun = datetime(2000, month, day, hour, minute, second)
    except ValueError:
        return None
    return (begun - datetime(2000, 1, 1)).total_seconds() + float(f"0.{found[6] or 0}")


def _launcher(text: str) -> str:
    found = ROOT_CAUSE.search(text)
    if found is None:
        return ""
    name = signal_of(int(found["code"]))
    ended = f"exit code {found['code']}{f' ({name})' if name else ''}"
    return f"rank {found['rank']} on {found['host']}, pid {found['pid']}: {ended} at {found['time']}"
