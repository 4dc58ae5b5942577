"""What a check or a row of the known-bad database says: one thing, its evidence, and what to do."""

from dataclasses import dataclass

OK, NOTE, WARNING, ERROR = "ok", "note", "warning", "error"
SEVERITIES = (OK, NOTE, WARNING, ERROR)  # from good to bad


@dataclass(frozen=True)
class Finding:
    """``severity`` is one of `SEVERITIES`; ``evidence`` is what was seen; all well needs no ``remedy``."""

    id: str
    severity: str
    what: str
    evidence: str = ""
    remedy: str = ""
    sources: tuple[str, ...] = ()


def worst(findings: "list[Finding]") -> str:
    """The worst severity among them; "ok" if there are none."""
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default=OK)


def by_severity(findings: "list[Finding]") -> "list[Finding]":
    """The worst first, else in their order."""
    return sorted(findings, key=lambda finding: -SEVERITIES.index(finding.severity))
