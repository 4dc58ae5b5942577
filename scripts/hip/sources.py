"""Which sources and wheels the recipes compiled, from BuildKit's log."""

import re

from scripts.testing.records import FAILED, PASSED, SKIPPED

OBJECT = r"CMakeFiles/[\w.]+\.dir/(?P<source>\S+)\.o"
LISTED = re.compile(rf"^#\d+ [\d.]+ {OBJECT}$")
COMPILED = re.compile(rf"^#\d+ [\d.]+ \[\d+/\d+\] Building (?:HIP|CXX) object {OBJECT}$")
REFUSED = re.compile(rf"^#\d+ [\d.]+ FAILED: (?:\[code=\d+\] )?{OBJECT} ?$")
CONFIGURED = re.compile(r"^#\d+ [\d.]+ -- Build files have been written to: ", re.MULTILINE)  # by CMake
WHEEL = re.compile(r"^#\d+ [\d.]+ +Created wheel for (?P<package>[\w.-]+): ", re.MULTILINE)
ERROR = re.compile(r"^#\d+ [\d.]+ (?:.*/)?(?P<error>[^/ ]+:\d+:\d+: (?:fatal )?error: .*|.*error: .*)$")


def outcomes(log: str, limit: str) -> dict[str, tuple[int, str]]:
    """Return outcome and reason of each source that the log of a recipe lists; ``limit`` is how it ended.

    Only vLLM's own CMake lists them.
    """
    found: dict[str, tuple[int, str]] = {}
    refused = ""
    for line in log.splitlines():
        if listed := LISTED.match(line):
            found[listed["source"]] = (SKIPPED, limit)
        elif compiled := COMPILED.match(line):
            found[compiled["source"]], refused = (PASSED, ""), ""
        elif failed := REFUSED.match(line):
            refused = failed["source"]
            found[refused] = (FAILED, "the compiler printed no error")
        elif refused and (error := ERROR.match(line)):
            found[refused], refused = (FAILED, error["error"]), ""
    return found


def lacks_sources(log: str) -> bool:
    """Return whether CMake configured a recipe, and the log lists no source."""
    return bool(CONFIGURED.search(log)) and not outcomes(log, "")


def wheels(log: str) -> set[str]:
    """Return the names of the wheels that the log shows compiled, with _ for -."""
    return {found["package"].replace("-", "_") for found in WHEEL.finditer(log)}
