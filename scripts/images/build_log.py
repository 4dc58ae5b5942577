"""Parse BuildKit's plain progress: which stage runs, which has ended, and why the build failed."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

STEP = re.compile(r"^#(?P<number>\d+) \[(?P<stage>[a-z][\w-]*) +\d+/\d+\]")
END = re.compile(r"^#(?P<number>\d+) (?:DONE (?P<seconds>[\d.]+)s|CACHED)")
FAILED = re.compile(r"^#(?P<number>\d+) ERROR: (?P<error>.*)", re.MULTILINE)
OWN_ERROR = re.compile(r"exit code: 1$")  # other codes are those of the builder, or of a killed process
NUMBERING = re.compile(r"^#\d+ (sha256:\S+|[\d.]+ )?")
CAUSES = (
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
    """A stage of the Dockerfile that runs, or whose step ended after ``seconds`` (0 if cached)."""

    name: str
    seconds: float | None = None


def stages(lines: Iterable[str]) -> Iterator[Stage]:
    """Yield the stages as their steps start and end."""
    names: dict[str, str] = {}
    for line in lines:
        if begun := STEP.match(line):
            names[begun["number"]] = begun["stage"]
            yield Stage(begun["stage"])
        elif (ended := END.match(line)) and ended["number"] in names:
            yield Stage(names[ended["number"]], float(ended["seconds"] or 0.0))


def cause(log: str) -> str:
    """Return the line of the failed step's output that explains a failed build, without numbering."""
    lines = log.splitlines()
    if failed := FAILED.search(log):
        own = f"#{failed['number']} "
        lines = [
            line for line in lines if line.startswith(own) and not FAILED.match(line) and not STEP.match(line)
        ]
    texts = [text for line in lines if (text := NUMBERING.sub("", line).strip())]
    for sign in CAUSES:
        if found := [text for text in texts if sign in text.lower()]:
            return found[0]
    if failed and not (texts and OWN_ERROR.search(failed["error"])):
        return failed["error"]
    return texts[-1] if texts else "the builder printed no output"
