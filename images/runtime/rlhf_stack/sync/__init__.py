"""Weight sync: sends the trainer's weights to every engine worker, and reports and verifies each sync.

May import `placement`, `cluster` and the layers below them; never `engine` or the layers above it.

Rank 0 of a sync group is the trainer; the workers of engine i with tensor parallelism T have the ranks
i*T+1 ... (i+1)*T. The group is separate from the process's default group and never changes it.
"""

from rlhf_stack.sync.actor_waits import wait_for_engine_results, wait_for_engine_start, wait_for_sync
from rlhf_stack.sync.backend import check_backend, create_group, requested_backend
from rlhf_stack.sync.engine_parameters import lora_obstacle
from rlhf_stack.sync.errors import SyncError, SyncMismatch
from rlhf_stack.sync.sending import send
