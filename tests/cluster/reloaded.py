"""A weight sync of a tiny model into a real engine, and what both compute before and after it.

reloaded.py FAMILY DIR [DTYPE] [lora]: writes to DIR/result.json the mean difference of the log-probabilities
of fixed tokens between transformers' model, which is the trainer's, and vLLM's: when the engine has loaded
the model (``fresh``), after the trainer has changed it (``changed``), after two weight syncs (``synced``),
and after vLLM's load_weights alone (``direct``, a text if it raises).
"""

import json
import os
import sys
from dataclasses import astuple
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import torch
import transformers
from rlhf_stack.sync.encoding import FULL

GPU, VOCABULARY, TOKENS = "node:0", 256, 48
BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
MLA = {
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
}
CONFIGURATIONS = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 8, "head_dim": 32, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 64}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2Config", {**EXPERTS, **MLA}),
}


def change(model: torch.nn.Module, seed: int) -> None:
    """Draw all weights, so large that a wrong one changes what the model computes."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.15, generator=generator)
        else:
            parameter.data.uniform_(0.5, 1.5, generator=generator)


def trainer_computes(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token but the first."""
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def main() -> None:
    """Sync twice and compare."""
    family, folder = sys.argv[1], Path(sys.argv[2])
    dtype = next(iter(sys.argv[3:4]), "bfloat16")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from rlhf_stack.engine import startup
    from rlhf_stack.sync import same_gpu
    from rlhf_stack.sync.buckets import plan_buckets
    from rlhf_stack.sync.engine_parameters import engine_parameters
    from rlhf_stack.sync.sending import BucketSender
    from vllm import LLM, SamplingParams, TokensPrompt

    name, options = CONFIGURATIONS[family]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**BASE | options))
    model.to(getattr(torch, dtype)).eval()
    change(model, seed=0)
    model.save_pretrained(folder / "model")
    if "lora" in sys.argv:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4)).to(model.dtype)
    arguments = startup.startup_arguments(0)
    del arguments["engine_index"]
    os.environ["RLHF_STACK_GPU_ID"] = GPU
    quiet = {"skip_tokenizer_init": True, "enforce_eager": True, "enable_prefix_caching": False}
    sizes = {"max_model_len": 128, "gpu_memory_utilization": 0.05, "dtype": dtype}
    engine = LLM(model=str(folder / "model"), **quiet, **sizes, **arguments)
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))

    def difference() -> float:
        prompt = TokensPrompt(prompt_token_ids=tokens.tolist())
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = engine.generate([prompt], sampling, use_tqdm=False)
        given = zip(tokens.tolist()[1:], output.prompt_logprobs[1:], strict=True)
        computed = torch.tensor([choices[token].logprob for token, choices in given])
        return float((computed - trainer_computes(model, tokens)).abs().mean())

    arguments = SimpleNamespace(ds=SimpleNamespace(zero_stage=2))
    trainer = SimpleNamespace(
        actor=SimpleNamespace(model=SimpleNamespace(module=model)), strategy=SimpleNamespace(args=arguments)
    )
    offer = same_gpu.Offer(GPU)
    engine.collective_rpc("join_same_gpu", args=({GPU: offer.address},))
    group = offer.accept()

    def sync() -> None:
        sent = engine_parameters(trainer, list(model.named_parameters()))
        specs = [each.spec(trainer) for each in sent]
        limit = 20_000
        buckets = plan_buckets(specs, limit)

        def send() -> None:
            with group.syncing():
                sender = BucketSender(group, in_place=False)
                for number, bucket in enumerate(buckets):
                    sender.send(number, bucket, [sent[span.index].value() for span in bucket.spans])
                sender.finish()

        sending = Thread(target=send)
        sending.start()
        engine.collective_rpc("receive_weights", args=([astuple(spec) for spec in specs], limit, FULL))
        sending.join()

    result: dict[str, object] = {"fresh": difference()}
    change(model, seed=2)
    result["changed"] = difference()
    sync()
    sync()
    result["synced"] = difference()
    change(model, seed=3)
    try:
        loader = engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
        loader.load_weights([(name, each.data) for name, each in model.named_parameters()])
        result["direct"] = difference()
    except Exception as error:
        result["direct"] = f"{type(error).__name__}: {error}"
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
