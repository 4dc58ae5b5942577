"""A row of the known-bad database, read from TOML and checked.

``packages`` are specifiers by name, of which all must hold; "python" and "glibc" are names too. ``variables``
are conditions on the environment: "set", "unset", "=value", "!=value" or "~pattern". ``differ`` are two
packages, or two variables, that are both there and not equal. ``when`` is what neither can show, in words.
``mended_by`` are patches of this distribution, by name without number: where all are present the row does not
hold. ``symptoms`` are patterns of which any in a log names the row. ``unsolvable`` are requirements that
exclude each other: a probe.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from rlhf_stack.known_bad.finding import ERROR, NOTE, WARNING

KINDS = ("hang", "crash", "wrong", "slow", "install")
SHOWN = ("run", "read", "told")  # by us, in the released code, in a thread
ACCELERATORS = ("cpu", "cuda", "rocm")
CONDITION = re.compile(r"set|unset|!?=.*|~.+")
NAME = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")
REQUIRED = ("id", "kind", "severity", "title", "cause", "remedy", "symptoms", "sources", "shown")
CONDITIONS = ("packages", "variables", "differ", "accelerator", "when", "mended_by", "unsolvable")
KEYS = REQUIRED + CONDITIONS


class MalformedRow(ValueError):
    """Which row, and what is wrong with it."""


@dataclass(frozen=True)
class Row:
    """One known-bad combination, or one symptom with its cause; the fields are those of the file."""

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
    variables: Mapping[str, str] = field(default_factory=dict)
    differ: tuple[str, ...] = ()
    accelerator: str | None = None
    when: str = ""
    mended_by: tuple[str, ...] = ()
    unsolvable: tuple[str, ...] = ()

    @property
    def has_condition(self) -> bool:
        """Whether versions and environment can tell that it applies; else only a log can."""
        return bool(self.packages or self.variables or self.differ)


def load() -> list[Row]:
    """Every row that this package carries, in the order of the files; `MalformedRow` if one is not right."""
    rows = []
    for file in sorted((files("rlhf_stack.known_bad") / "rows").iterdir(), key=lambda entry: entry.name):
        rows += list(read(file.read_text(encoding="utf-8")))
    twice = {row.id for row in rows if sum(row.id == other.id for other in rows) > 1}
    if twice:
        raise MalformedRow(f"more than one row is called {', '.join(sorted(twice))}")
    return rows


def read(text: str) -> Iterator[Row]:
    """The rows of one file; `MalformedRow` names the row and what is wrong."""
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
    values["symptoms"] = tuple(re.compile(pattern, re.MULTILINE) for pattern in entry["symptoms"])
    values["unsolvable"] = tuple(entry.get("unsolvable", {}).get("requirements", ()))
    for name in ("sources", "differ", "mended_by"):
        values[name] = tuple(entry.get(name, ()))
    row = Row(**values)
    for wrong, what in _mistakes(row):
        if wrong:
            raise ValueError(what)
    return row


def _mistakes(row: Row) -> Iterator[tuple[bool, str]]:
    yield not NAME.fullmatch(row.id), "an id is of lower-case words joined by hyphens"
    yield row.kind not in KINDS, f"kind {row.kind!r}: expected one of {KINDS}"
    yield row.severity not in (NOTE, WARNING, ERROR), f"severity {row.severity!r}"
    yield row.shown not in SHOWN, f"shown {row.shown!r}: expected one of {SHOWN}"
    yield row.accelerator not in (None, *ACCELERATORS), f"accelerator {row.accelerator!r}"
    yield not row.sources, "a row without a source is hearsay"
    yield not (row.has_condition or row.symptoms), "nothing tells that it applies"
    yield bool(row.differ) and len(row.differ) != 2, "differ takes two names"
    yield any(not CONDITION.fullmatch(text) for text in row.variables.values()), "a condition on a variable"
    yield any(pattern.match("") for pattern in row.symptoms), "a symptom that every text has"


def _specifier(text: str) -> SpecifierSet:
    try:
        return SpecifierSet(text, prereleases=True)
    except InvalidSpecifier as error:
        raise ValueError(f"{text!r} is no version specifier") from error
