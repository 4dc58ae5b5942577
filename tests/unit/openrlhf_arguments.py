"""What the parsers of OpenRLHF return, as far as a run is planned from it."""

from types import SimpleNamespace
from typing import Any

FLAT: dict[str, Any] = {
    "actor_num_nodes": 2,
    "actor_num_gpus_per_node": 4,
    "ref_num_nodes": 1,
    "ref_num_gpus_per_node": 2,
    "critic_num_nodes": 1,
    "critic_num_gpus_per_node": 4,
    "reward_num_nodes": 1,
    "reward_num_gpus_per_node": 2,
    "colocate_actor_ref": False,
    "colocate_critic_reward": False,
    "vllm_num_engines": 2,
    "vllm_tensor_parallel_size": 4,
    "vllm_sync_backend": "nccl",
    "pretrain": "policy",
    "critic_pretrain": "value",
    "reward_pretrain": "judge",
    "remote_rm_url": None,
    "ref_reward_offload": False,
    "zero_stage": 2,
    "adam_offload": False,
    "grad_accum_dtype": None,
    "zpg": 1,
    "max_len": None,
    "prompt_max_len": 1024,
    "generate_max_len": 2048,
    "micro_train_batch_size": 4,
    "micro_rollout_batch_size": 8,
    "train_batch_size": 128,
    "gradient_checkpointing": True,
    "flash_attn": False,
    "lora_rank": 0,
    "enable_ema": False,
}


def flat(**changes: Any) -> SimpleNamespace:
    """Arguments of OpenRLHF 0.5.1."""
    return SimpleNamespace(**FLAT | changes)


def sections(**changes: Any) -> SimpleNamespace:
    """Arguments of OpenRLHF 0.11.2; ``changes`` by names such as ``train__colocate_all``."""
    groups: dict[str, dict[str, Any]] = {
        "actor": {"gradient_checkpointing_enable": False, "adam": SimpleNamespace(weight_decay=0.0)},
        "ref": {"offload": False},
        "critic": {"adam": SimpleNamespace(weight_decay=0.0)},
        "reward": {"offload": False, "remote_url": None},
        "train": {
            "colocate_all": False,
            "colocate_actor_ref": False,
            "colocate_critic_reward": False,
            "async_enable": False,
            "dynamic_batch_enable": False,
            "max_tokens_per_gpu": 16192,
            "micro_batch_size": 2,
            "batch_size": 128,
            "enable_ema": False,
        },
        "rollout": {"micro_batch_size": 4, "max_tokens_per_gpu": None},
        "ds": {
            "zero_stage": 3,
            "adam_offload": True,
            "grad_accum_dtype": None,
            "overlap_comm": False,
            "zpg": 1,
            "attn_implementation": "sdpa",
            "enable_sleep": False,
            "tensor_parallel_size": 1,
            "ring_attn_size": 1,
            "lora": SimpleNamespace(rank=0),
        },
        "vllm": {
            "num_engines": 2,
            "tensor_parallel_size": 4,
            "gpu_memory_utilization": 0.8,
            "enable_sleep": False,
        },
        "data": {"max_len": 4096},
    }
    for role in ("actor", "ref", "critic", "reward"):
        groups[role] |= {"num_nodes": 1, "num_gpus_per_node": 8, "model_name_or_path": f"{role}-model"}
    for name, value in changes.items():
        group, _, key = name.partition("__")
        groups[group][key] = value
    kl = SimpleNamespace(kl=SimpleNamespace(init_coef=0.01))
    return SimpleNamespace(algo=kl, **{name: SimpleNamespace(**group) for name, group in groups.items()})
