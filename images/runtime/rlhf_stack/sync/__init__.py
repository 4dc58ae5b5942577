"""How the trainer's weights reach every engine worker.

Rank 0 is the trainer; the workers of engine i with tensor parallelism T have the ranks i*T+1 ... (i+1)*T.
The group stands beside the default group of each process and never touches it.
"""

from rlhf_stack.sync.backend import check_backend, create_group, of_run
from rlhf_stack.sync.deadlines import wait, wait_for_engines, wait_for_trainers
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.sending import send

__all__ = [
    "SyncError",
    "check_backend",
    "create_group",
    "of_run",
    "send",
    "wait",
    "wait_for_engines",
    "wait_for_trainers",
]
