"""What a dead run left on this node, of this user and this container, and nothing else."""

from collections.abc import Sequence

from rlhf_stack import processes
from rlhf_stack.processes import Process


def orphans(table: Sequence[Process], uid: int) -> list[Process]:
    """The workers of Ray, and all that they started, of ``uid``, whose raylet is gone.

    A worker that lives descends from its raylet; when that dies, its workers are handed to another process.
    """
    of_raylets = processes.children((p.pid for p in table if p.role == processes.RAYLET), table)
    lost = [p.pid for p in table if p.role == processes.WORKER and p.pid not in of_raylets]
    below = processes.children(lost, table)
    return [p for p in table if p.pid in below and p.uid == uid and p.state != processes.ZOMBIE]
