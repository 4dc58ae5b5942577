"""A row of the known-bad database, read from TOML and validated.

``packages``: version specifiers by name, which all must hold; "python" and "glibc" are names too. ``absent``:
names of packages; if one is installed, the row does not apply.
``variables``: conditions on environment variables: "set", "unset", "=value", "!=value" or "~pattern".
``differ``: two packages or variables that are both present and not equal. ``when``: a condition in words that
cannot be checked.
``fixed_by``: patches of this distribution, by name without number; if all are present the row does not apply.
``symptoms``: patterns; a match of any in a log, with a match of each of ``context`` anywhere in it,
identifies the row. ``no_symptom``: why a log cannot show the row; required without symptoms.
``instead_of``: more general rows, which are omitted if this one is found. ``consequence``: the cause is
likely another error of the log, so the row ranks behind others. ``general``: the row names only the kind of
an error by its words, so it is omitted if another row matches the same line.
``unsolvable``: requirements that exclude each other, for the probe with the resolver. ``reproduce``: Python
code that fails with a symptom on a CPU, for the probes in an image. ``shown``: how the cause was confirmed.
"""

import functools
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from rlhf_stack.known_bad.finding import ERROR, NOTE, WARNING

KINDS = ("hang", "crash", "wrong", "slow", "install")
SHOWN = ("run", "read", "reported")  # by our own run, in the released code, in an issue
ACCELERATORS = ("cpu", "cuda", "rocm")
CONDITION = re.compile(r"set|unset|!?=.*|~.+")
NAME = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")
REQUIRED = ("id", "kind", "severity", "title", "cause", "remedy", "symptoms", "sources", "shown")
CONDITIONS = ("packages", "absent", "variables", "differ", "accelerator", "when", "fixed_by", "unsolvable")
IN_A_LOG = ("context", "no_symptom", "instead_of", "consequence", "general", "reproduce")
KEYS = REQUIRED + CONDITIONS + IN_A_LOG


class MalformedRow(ValueError):
    """A row is invalid; the message names the row and the reason."""


@dataclass(frozen=True)
class Row:
    """A known-bad combination, or a symptom with its cause; the fields are the keys in the file."""

    id: str
    kind: str
    severity: str
    title: str
    cause: str
    remedy: str
    symptoms: tuple[re.Pattern[str], ...]
    sources: tuple[str, ...]
    shown: str
    packages: Mapping[str, SpecifierSet] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()
    variables: Mapping[str, str] = field(default_factory=dict)
    differ: tuple[str, ...] = ()
    accelerator: str | None = None
    when: str = ""
    fixed_by: tuple[str, ...] = ()
    unsolvable: tuple[str, ...] = ()
    context: tuple[re.Pattern[str], ...] = ()
    no_symptom: str = ""
    instead_of: tuple[str, ...] = ()
    consequence: bool = False
    general: bool = False
    reproduce: str = ""

    @property
    def has_condition(self) -> bool:
        """Whether versions and environment can show that the row applies; otherwise only a log can."""
        return bool(self.packages or self.variables or self.differ)


def load() -> list[Row]:
    """Load all rows in the order of the files; `MalformedRow` if one is invalid."""
    return list(_rows())


@functools.cache
def _rows() -> tuple[Row, ...]:
    rows: list[Row] = []
    for file in sorted((files("rlhf_stack.known_bad") / "rows").iterdir(), key=lambda entry: entry.name):
        rows += list(read(file.read_text(encoding="utf-8")))
    ids = Counter(row.id for row in rows)
    duplicates = sorted(name for name, number in ids.items() if number > 1)
    if duplicates:
        raise MalformedRow(f"more than one row has the id {', '.join(duplicates)}")
    unknown = sorted({name for row in rows for name in row.instead_of} - set(ids))
    if unknown:
        raise MalformedRow(f"instead_of names rows that do not exist: {', '.join(unknown)}")
    return tuple(rows)


def read(text: str) -> Iterator[Row]:
    """Parse the rows of a file; `MalformedRow` names the first invalid row."""
    for entry in tomllib.loads(text)["row"]:
        try:
            yield _row(entry)
        except (ValueError, re.error, TypeError) as error:
            raise MalformedRow(f"row {entry.get('id', entry)!r}: {error}") from error


def _row(entry: dict[str, Any]) -> Row:
    missing, unknown = set(REQUIRED) - set(entry), set(entry) - set(KEYS)
    if missing or unknown:
        raise ValueError(f"missing {sorted(missing)}, unknown {sorted(unknown)}")
    values = dict(entry)
    values["packages"] = {name: _specifier(text) for name, text in entry.get("packages", {}).items()}
    for name in ("symptoms", "context"):
        values[name] = tuple(re.compile(pattern, re.MULTILINE) for pattern in entry.get(name, ()))
    values["unsolvable"] = tuple(entry.get("unsolvable", {}).get("requirements", ()))
    for name in ("sources", "differ", "fixed_by", "instead_of"):
        values[name] = tuple(entry.get(name, ()))
    values["absent"] = frozenset(entry.get("absent", ()))
    row = Row(**values)
    for wrong, message in _validation_errors(row):
        if wrong:
            raise ValueError(message)
    return row


def _validation_errors(row: Row) -> Iterator[tuple[bool, str]]:
    yield not NAME.fullmatch(row.id), "an id consists of lower-case words joined by hyphens"
    yield row.kind not in KINDS, f"kind {row.kind!r}: expected one of {KINDS}"
    yield row.severity not in (NOTE, WARNING, ERROR), f"invalid severity {row.severity!r}"
    yield row.shown not in SHOWN, f"shown {row.shown!r}: expected one of {SHOWN}"
    yield row.accelerator not in (None, *ACCELERATORS), f"invalid accelerator {row.accelerator!r}"
    yield not row.sources, "a row needs a source"
    yield not (row.has_condition or row.symptoms), "a row needs a condition or a symptom"
    yield bool(row.symptoms) == bool(row.no_symptom), "a row needs either symptoms or no_symptom, the reason"
    yield (
        bool(row.context or row.reproduce or row.general) and not row.symptoms,
        "context, reproduce or general without symptoms",
    )
    yield bool(row.differ) and len(row.differ) != 2, "differ needs two names"
    yield (
        any(not CONDITION.fullmatch(text) for text in row.variables.values()),
        "invalid condition on a variable",
    )
    yield (
        any(pattern.match("") for pattern in row.symptoms + row.context),
        "a symptom that matches every text",
    )


def _specifier(text: str) -> SpecifierSet:
    try:
        return SpecifierSet(text, prereleases=True)
    except InvalidSpecifier as error:
        raise ValueError(f"{text!r} is not a version specifier") from error
