"""What `rlhf-stack doctor` tells of a cluster, without what it says of the machine that the tests run on."""

from typing import Any

OF_THE_MACHINE = {"disk"}


def errors(told: dict[str, Any]) -> list[dict[str, Any]]:
    """The findings that are errors of the cluster."""
    return [one for one in told["findings"] if one["severity"] == "error" and one["id"] not in OF_THE_MACHINE]


def addresses(told: dict[str, Any]) -> set[str]:
    """The nodes that answered."""
    return {one["node"] for one in told["findings"] if one["id"] == "patches"}
