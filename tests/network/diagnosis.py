"""Findings of `rlhf-stack doctor` about a cluster, without those about the machine that runs the tests."""

from typing import Any

MACHINE_FINDINGS = {"disk"}


def errors(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings that are errors of the cluster."""
    return [
        one for one in report["findings"] if one["severity"] == "error" and one["id"] not in MACHINE_FINDINGS
    ]


def addresses(report: dict[str, Any]) -> set[str]:
    """Return the addresses of the nodes that answered."""
    return {one["node"] for one in report["findings"] if one["id"] == "patches"}
