"""The head's job server, reachable for jobs that are submitted on another machine."""

from scripts.testing.cluster import ContainerNode, ray_start

SERVER = "http://head:8265"


def reachable(node: ContainerNode, head: str | None) -> list[str]:
    """Return the ``ray start`` of a node; the head's job server listens to all machines."""
    return [*ray_start(node, head), *(["--dashboard-host=0.0.0.0"] if head is None else [])]
