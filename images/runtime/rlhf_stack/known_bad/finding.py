"""The result of a check or of a row of the known-bad database."""

from dataclasses import dataclass

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
SEVERITIES = (OK, NOTE, WARNING, ERROR)  # from best to worst


@dataclass(frozen=True)
class Finding:
    """A finding; ``severity`` is one of `SEVERITIES`, ``remedy`` is required for warnings and errors.

    ``line``: the line of the log that ``evidence`` quotes, from 1; negative if it is counted from the end.
    """

    id: str
    severity: str
    what: str
    evidence: str = ""
    remedy: str = ""
    sources: tuple[str, ...] = ()
    line: int | None = None


def worst(findings: "list[Finding]") -> str:
    """The worst severity of the findings; "ok" if there are none."""
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default=OK)


def by_severity(findings: "list[Finding]") -> "list[Finding]":
    """The findings, the worst first, otherwise in their order."""
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
