"""A sync group that is formed again, with the restarted engines."""

from typing import Any

from rlhf_stack.sync.actor_waits import wait_for_engine_results
from rlhf_stack.sync.backend import requested_backend
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.sending import supports_buckets


def form_group_again(trainer: Any) -> None:
    """Let rank 0 of OpenRLHF's ``ActorPPOTrainer`` and every engine leave their group and join a new one.

    All engines must be up. On the other ranks it does nothing. `SyncError` if the weights are sent in a way
    by which a restarted engine cannot receive them.
    """
    import torch

    if torch.distributed.get_rank() != 0:
        return
    if not supports_buckets(trainer):
        raise SyncError(
            "a restarted engine cannot receive weights by Ray's collectives, over CUDA IPC or from "
            "DeepSpeed's tensor parallelism: submit the run again, from its last checkpoint"
        )
    wait_for_engine_results(
        [engine.call_workers.remote("leave_weight_group") for engine in trainer.vllm_engines],
        "the engines to leave the weight-sync group",
    )
    trainer._model_update_group.close()
    trainer._init_vllm_sync_group(requested_backend(trainer.strategy.args))
