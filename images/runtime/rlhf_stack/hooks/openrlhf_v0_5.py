"""What the patches of OpenRLHF 0.5.1 call. torch, ray and vllm are imported when a function needs them."""

import os
from collections.abc import Sequence
from typing import Any

from rlhf_stack import sync
from rlhf_stack.accelerator.devices import (
    current_device,
    current_stream,
    device_type,
    set_device,
    torch_device,
)
from rlhf_stack.cluster.actor_registry import register_rank, translate_actor_errors
from rlhf_stack.cluster.assigned_gpu import local_rank
from rlhf_stack.compat.deepspeed_ops import adam_class
from rlhf_stack.compat.determinism import begin_rollout, rollout_seed, seed_training, sort_experiences
from rlhf_stack.compat.zero3_gather import serialize_allgather
from rlhf_stack.config import env_vars
from rlhf_stack.config.env_vars import sync_backend as default_sync_backend
from rlhf_stack.diagnostics.installed_patches import warn_of_replaced_packages
from rlhf_stack.engine.actor import BlockingEngineMixin, count_generated_tokens
from rlhf_stack.engine.request_balancer import merge_answers, split_prompts
from rlhf_stack.engine.startup import begin as begin_engine_startup
from rlhf_stack.engine.startup import join as join_engine_startup
from rlhf_stack.engine.startup import step as engine_startup_step
from rlhf_stack.engine.startup import wait_for_engine_startup
from rlhf_stack.engine.worker_extension import use_worker_class, worker_class
from rlhf_stack.openrlhf import run_groups
from rlhf_stack.openrlhf.checkpoint_errors import name_checkpoint_errors
from rlhf_stack.openrlhf.log_probs import language_model_loss, log_probs
from rlhf_stack.openrlhf.moving_average import average_weights
from rlhf_stack.openrlhf.run_groups import claim_engine_groups, claim_role_group, wait_for_role_group
from rlhf_stack.placement import rank_bundles
from rlhf_stack.recovery.trainer_state import CountedCycle, restore_trainer_state, save_trainer_state
from rlhf_stack.sync import create_group as create_weight_group
from rlhf_stack.sync import send as send_weights
from rlhf_stack.sync import wait_for_engine_results, wait_for_sync
from rlhf_stack.sync.report import with_recorded_sync
from rlhf_stack.telemetry import run_log
from rlhf_stack.telemetry.events import models_up as record_models_ready
from rlhf_stack.telemetry.events import phase as record_phase
from rlhf_stack.telemetry.events import step as record_step

WITHOUT_EFFECT = {  # variables of OpenRLHF 0.11.2, with the value that asks for nothing
    env_vars.ENGINE_RESTARTS: "0",
    env_vars.MIN_ENGINES: "1",
    env_vars.CHECK_COTENANCY: "0",
    env_vars.SYNC_SOURCES: "auto",
}


def prepare_weight_sync(backend: str, engines: Sequence[Any]) -> None:
    """Refuse an unusable sync backend, then wait until every engine is up, before the rendezvous starts."""
    sync.check_backend(backend, with_ray=False)
    sync.wait_for_engine_start(engines)


def reserve_run(args: Any) -> dict[str, Any]:
    """See `run_groups.reserve_run`; logs a warning for each variable that this release cannot honour."""
    for name, usual in WITHOUT_EFFECT.items():
        if (value := os.environ.get(name, "")) not in ("", usual):
            run_log.warning(f"{name}={value} has no effect: it needs OpenRLHF 0.11.2")
    return run_groups.reserve_run(args)
