"""What the patches of OpenRLHF 0.11.2 call. torch, ray and vllm are imported when a function needs them."""

from rlhf_stack.accelerator.devices import (
    current_device,
    device_type,
    export_physical_gpu_id,
    is_gpu,
    set_device,
    synchronize,
    torch_device,
)
from rlhf_stack.accelerator.devices import environment_for as environment_for_gpus
from rlhf_stack.cluster.actor_registry import register_rank, translate_actor_errors
from rlhf_stack.cluster.answer_once import AnswersOnce, repeats_calls
from rlhf_stack.cluster.assigned_gpu import local_rank
from rlhf_stack.compat.byte_level_tokenizers import keep_byte_level_tokenizers
from rlhf_stack.compat.deepspeed_ops import optimizer_config
from rlhf_stack.compat.determinism import continues_from, seed_prompt_shuffle, seed_training, wait_for_answer
from rlhf_stack.compat.offloaded_states import drop_loaded_copies
from rlhf_stack.compat.varlen_attention import check_model as check_attention
from rlhf_stack.compat.varlen_attention import implementation as attention_implementation
from rlhf_stack.compat.zero3_buffers import keep_buffers_precise
from rlhf_stack.config.env_vars import sync_backend as default_sync_backend
from rlhf_stack.diagnostics.installed_patches import warn_of_replaced_packages
from rlhf_stack.engine.actor import AsyncEngineMixin
from rlhf_stack.engine.gpu_contention import track_collectives
from rlhf_stack.engine.prompt_requests import answers_of, request_answers
from rlhf_stack.engine.recipes import MOST_CALLS
from rlhf_stack.engine.recipes import record as record_engine
from rlhf_stack.engine.request_balancer import assign_prompts
from rlhf_stack.engine.restarts import (
    engine_results,
    forms_weight_group,
    record_models_ready,
    sync_weights,
    use_to_send_weights,
    wait_for_restarts,
)
from rlhf_stack.engine.restarts import wait_for_start as wait_for_engine_startup
from rlhf_stack.engine.startup import begin as begin_engine_startup
from rlhf_stack.engine.startup import start_engine, startup_arguments
from rlhf_stack.openrlhf.checkpoint_errors import name_checkpoint_errors
from rlhf_stack.openrlhf.generation_config import make_generation_config_valid
from rlhf_stack.openrlhf.last_batch import check_trained, leave_out_incomplete_batch
from rlhf_stack.openrlhf.moving_average import average_weights
from rlhf_stack.openrlhf.run_groups import (
    claim_engine_groups,
    claim_role_group,
    controller,
    reserve_run,
    wait_for_role_group,
)
from rlhf_stack.placement import driver_cpus, engine_place, rank_bundles
from rlhf_stack.recovery.checkpoint_on_request import begins_step, ends_step, trains, uses_models
from rlhf_stack.recovery.trainer_state import restore_trainer_state, save_trainer_state
from rlhf_stack.sync.actor_trainer import sends_weights
from rlhf_stack.sync.regrouping import form_group_again
from rlhf_stack.telemetry.events import phase as record_phase
from rlhf_stack.telemetry.events import step as record_step
