"""BuildKit's plain progress, read while it is written: which stage runs, which ended, why it failed."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

STEP = re.compile(r"^#(?P<number>\d+) \[(?P<stage>[a-z][\w-]*) +\d+/\d+\]")
END = re.compile(r"^#(?P<number>\d+) (?:DONE (?P<seconds>[\d.]+)s|CACHED)")
FAILED = re.compile(r"^#(?P<number>\d+) ERROR: ", re.MULTILINE)
NUMBERING = re.compile(r"^#\d+ (sha256:\S+|[\d.]+ )?")
TELLING = (
    "no space left",
    "do not match",
    "mismatch",
    "could not resolve",
    "error:",
    "error sending",
    "failed",
)


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
    """The line that says why a build failed: of what the failed step printed, without numbering."""
    lines = log.splitlines()
    if failed := FAILED.search(log):
        own = f"#{failed['number']} "
        lines = [
            line for line in lines if line.startswith(own) and not FAILED.match(line) and not STEP.match(line)
        ]
    texts = [text for line in lines if (text := NUMBERING.sub("", line).strip())]
    for words in TELLING:
        if found := [text for text in texts if words in text.lower()]:
            return found[0]
    return texts[-1] if texts else "the builder printed nothing"
