"""What `rlhf-stack doctor` tells of a cluster, without what it says of the machine that the tests run on."""

from typing import Any

from scripts.matrix.load import Cell

OF_THE_MACHINE = {"disk"}
OF_A_STAND_IN = {"nccl"}  # its env defaults name the vendor's library, which its torch does not bring


def errors(told: dict[str, Any], cell: Cell) -> list[dict[str, Any]]:
    """The findings that are errors of the cluster."""
    known = OF_THE_MACHINE | (OF_A_STAND_IN if cell.stand_in else set())
    return [one for one in told["findings"] if one["severity"] == "error" and one["id"] not in known]


def addresses(told: dict[str, Any]) -> set[str]:
    """The nodes that answered."""
    return {one["node"] for one in told["findings"] if one["id"] == "patches"}
