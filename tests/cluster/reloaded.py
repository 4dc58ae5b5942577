"""A weight sync of a tiny model into a real engine, and what both compute before and after it.

reloaded.py FAMILY DIR [--dtype D] [--lora] [--frozen TEXT] [--workers N] [--quantization Q]: writes to
DIR/result.json the mean difference of the log-probabilities of fixed tokens, and of those that the engine
generates then, between transformers' model, which is the trainer's, and vLLM's: when the engine has loaded
the model (``fresh``), after the trainer has changed it (``changed``), after two weight syncs (``synced``),
and after vLLM's load_weights alone (``direct``, a text if it raises). Of an engine of several workers it has
no ``direct``, but the bytes of all weights and those that each worker copied in each sync (``copied``).
Parameters with ``--frozen`` in their names do not change and are not sent; ``unsent`` are the names that
workers reported. An engine that quantizes is also compared with one that was started from the weights of the
last sync (``restarted``); ``unequal`` are parameters whose checksums differ from the trainer's, and those in
``rearranged`` have none.
"""

import argparse
import json
import os
from dataclasses import astuple
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import torch
import transformers
from rlhf_stack.sync.encoding import FULL

VOCABULARY, TOKENS, GENERATED = 256, 48, 12
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
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}
CONFIGURATIONS = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 8, "head_dim": 32, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 64}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "head_dim": 32, "num_key_value_heads": 2, "intermediate_size": 128},
    ),
    "deepseek_v2": ("DeepseekV2Config", {**EXPERTS, **MLA, "topk_method": "greedy", "rope_parameters": YARN}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**EXPERTS, **MLA, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
}


def change(model: torch.nn.Module, seed: int) -> None:
    """Draw all trained weights, so large that a wrong one changes what the model computes."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
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
    parser = argparse.ArgumentParser()
    parser.add_argument("family", choices=CONFIGURATIONS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--frozen", default="")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quantization")
    options = parser.parse_args()
    folder, workers = options.folder, options.workers
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # workers of one engine share the cores of a node
    from rlhf_stack.cluster.host import free_port
    from rlhf_stack.engine import startup
    from rlhf_stack.sync import create_group
    from rlhf_stack.sync.buckets import plan_buckets
    from rlhf_stack.sync.digest import RegionDigest, differences
    from rlhf_stack.sync.engine_parameters import engine_parameters
    from rlhf_stack.sync.sending import BucketSender
    from vllm import LLM, SamplingParams, TokensPrompt

    name, changes = CONFIGURATIONS[options.family]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**BASE | changes))
    model.to(getattr(torch, options.dtype)).eval()
    change(model, seed=0)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):  # of DeepSeek-V3's router; no optimizer trains it
            buffer.copy_(torch.linspace(-0.2, 0.2, buffer.numel()))
    model.save_pretrained(folder / "model")
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not options.frozen or options.frozen not in parameter_name)
    if options.lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4)).to(model.dtype)
    arguments = startup.startup_arguments(0)
    del arguments["engine_index"]
    quiet = {"skip_tokenizer_init": True, "enforce_eager": True, "enable_prefix_caching": False}
    sizes = {"max_model_len": 128, "gpu_memory_utilization": 0.05, "dtype": options.dtype}
    sizes["tensor_parallel_size"] = workers
    settings = {**quiet, **sizes, **arguments, "quantization": options.quantization}
    engine = LLM(model=str(folder / "model"), **settings)
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    sampling = SamplingParams(
        max_tokens=GENERATED, temperature=0, ignore_eos=True, detokenize=False, logprobs=0, prompt_logprobs=0
    )

    def engine_computes(engine: LLM, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``tokens`` and what the engine generates, and the log-probability of all but the first."""
        prompt = TokensPrompt(prompt_token_ids=tokens.tolist())
        (output,) = engine.generate([prompt], sampling, use_tqdm=False)
        (answer,) = output.outputs
        sequence = [*tokens.tolist(), *answer.token_ids]
        given = zip(sequence[1:], [*output.prompt_logprobs[1:], *answer.logprobs], strict=True)
        computed = torch.tensor([choices[token].logprob for token, choices in given])
        return torch.tensor(sequence), computed

    def difference() -> float:
        sequence, computed = engine_computes(engine, tokens)
        return float((computed - trainer_computes(model, sequence)).abs().mean())

    arguments = SimpleNamespace(ds=SimpleNamespace(zero_stage=2))
    trainer = SimpleNamespace(
        actor=SimpleNamespace(model=SimpleNamespace(module=model)), strategy=SimpleNamespace(args=arguments)
    )
    where = "127.0.0.1", free_port("127.0.0.1")
    join = {"args": (*where, 1, workers + 1, "gloo")}
    joining = Thread(target=engine.collective_rpc, args=("join_weight_group",), kwargs=join)
    joining.start()
    group = create_group(*where, 0, workers + 1, torch.device("cpu"), "gloo")
    joining.join()
    copied: list[list[int]] = []

    def sync() -> None:
        named = list(model.named_parameters())
        trained = [(name, each) for name, each in named if each.requires_grad or options.lora]
        sent = engine_parameters(trainer, trained)
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
        content = [astuple(spec) for spec in specs]
        reports = engine.collective_rpc("receive_weights", args=(content, limit, FULL))
        copied.append([sum(spec.size for spec in specs), *(report["copied"] for report in reports)])
        sending.join()
        unsent.extend(name for report in reports for name in report.get("unsent", ()))

    unsent: list[str] = []
    result: dict[str, object] = {"fresh": difference()}
    change(model, seed=2)
    result["changed"] = difference()
    sync()
    change(model, seed=3)
    sync()
    result |= {"synced": difference(), "copied": copied, "unsent": unsent}
    if options.quantization:
        model.save_pretrained(folder / "restarted")
        restarted = LLM(model=str(folder / "restarted"), **settings)
        held, expected = (engine_computes(each, tokens)[1] for each in (engine, restarted))
        result["restarted"] = float((held - expected).abs().mean())
        sent = engine_parameters(trainer, list(model.named_parameters()))
        shapes = [(one.name, list(one.spec(trainer).shape)) for one in sent]
        (found,) = engine.collective_rpc("weight_digests", args=(shapes,))
        digests = [RegionDigest.from_dict(each) for each in found["digests"]]
        result |= {"rearranged": found["rearranged"], "unequal": []}
        for one in sent:
            own = [[[each for each in digests if each.name == one.name]]]
            if one.name not in found["rearranged"] and differences(one.name, one.value(), own):
                result["unequal"].append(one.name)
    if workers == 1:
        change(model, seed=4)
        loader = engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
        try:
            loader.load_weights([(name, each.data) for name, each in model.named_parameters()])
            result["direct"] = difference()
        except Exception as error:
            result["direct"] = f"{type(error).__name__}: {error}"
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
