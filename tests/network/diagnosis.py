"""Findings of `rlhf-stack doctor` about a cluster, without those about the machine that runs the tests."""

from typing import Any

from scripts.matrix.load import Cell

MACHINE_FINDINGS = {"disk"}
STAND_IN_FINDINGS = {"nccl"}  # its env defaults name the vendor's library, which its torch lacks


def errors(report: dict[str, Any], cell: Cell) -> list[dict[str, Any]]:
    """Return the findings that are errors of the cluster."""
    known = MACHINE_FINDINGS | (STAND_IN_FINDINGS if cell.stand_in else set())
    return [one for one in report["findings"] if one["severity"] == "error" and one["id"] not in known]


def addresses(report: dict[str, Any]) -> set[str]:
    """Return the addresses of the nodes that answered."""
    return {one["node"] for one in report["findings"] if one["id"] == "patches"}
