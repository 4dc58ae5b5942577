"""BuildKit's plain progress, read while it is written: which stage runs, which are done, and why it failed."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

STEP = re.compile(r"^#(?P<number>\d+) \[(?P<stage>[a-z]\w*) +\d+/\d+\]")
END = re.compile(r"^#(?P<number>\d+) (?P<how>DONE (?P<seconds>[\d.]+)s|CACHED)")
OUTPUT = re.compile(r"^#\d+ (sha256:\S+|[\d.]+ )?")
TELLING = ("no space left", "do not match", "mismatch", "could not resolve", "connection", "error:", "failed")


@dataclass(frozen=True)
class Stage:
    """A stage of the Dockerfile that is at work, or has ended after ``seconds`` (0 if it was cached)."""

    name: str
    seconds: float | None = None


def stages(lines: Iterable[str]) -> Iterator[Stage]:
    """What happens, line by line: a stage that begins, a step of it that ends."""
    names: dict[str, str] = {}
    for line in lines:
        if begun := STEP.match(line):
            names[begun["number"]] = begun["stage"]
            yield Stage(begun["stage"])
        elif (ended := END.match(line)) and ended["number"] in names:
            yield Stage(names[ended["number"]], float(ended["seconds"] or 0.0))


def cause(log: str) -> str:
    """The line that says why a build failed, without BuildKit's numbering."""
    lines = [OUTPUT.sub("", line).strip() for line in log.splitlines()]
    lines = [line for line in lines if line]
    for words in TELLING:
        if found := [line for line in lines if words in line.lower()]:
            return found[0]
    return lines[-1] if lines else "the builder printed nothing"
