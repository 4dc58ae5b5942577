"""Measures what torch, DeepSpeed and vLLM allocate for small models, next to rlhf_stack.memory's estimates.

``python measured.py {activations,states,cache}`` prints JSON: a list of name, estimated and measured bytes.
It runs on a CPU, profiles torch's allocator, and sums the tensors of DeepSpeed engines on two real ranks.
``tests/image/test_memory.py`` checks the differences, ``tests/bench/memory.py`` shows them.
"""

import gc
import json
import os
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rlhf_stack.certify import memory_peaks
from rlhf_stack.certify.memory_peaks import SMALL

RANKS = 2
SECONDS = 240
LENGTH = 128
ENGINES = {"a": SMALL, "odd sizes": replace(SMALL, layers=3, hidden=192, heads=3, kv_heads=1)}
CACHE_GIB = 1


def main() -> int:
    """Run one kind of measurement."""
    kind = sys.argv[1]
    rows = {"activations": activations, "states": all_states, "cache": cache, "rank": one_rank}[kind]()
    print(json.dumps(rows))
    return 0


def row(name, estimated, measured):
    """Return one row of the result."""
    return {"name": name, "estimated": estimated, "measured": measured}


def activations():
    """Measure OpenRLHF's actor: activations saved by a forward pass, and peaks of training and inference."""
    return [row(*one) for one in memory_peaks.activations(memory_peaks.SMALL, memory_peaks.LENGTH)]


def stages():
    """Return OpenRLHF's DeepSpeed configurations: stage, offloading, and gradients in 32 bits."""
    from importlib.metadata import version

    wide = version("openrlhf").startswith("0.5")
    return [
        (stage, offload, wide) for stage in (1, 2, 3) for offload in (False, True) if not offload or stage > 1
    ]


def all_states():
    """Measure the tensors of DeepSpeed engines on two ranks, after a step and with gradients."""
    import subprocess

    with socket.socket() as held, tempfile.TemporaryDirectory() as folder:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(
            ("127.0.0.1", 0)
        )  # without a listener: no other process gets the port, and rank 0 listens at it
        port = str(held.getsockname()[1])
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS), "HOME": folder}
        ranks = []
        for rank in range(RANKS):
            environment = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, __file__, "rank"]
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        try:
            outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    return json.loads(outputs[0].splitlines()[-1])


def one_rank():
    """Run a rank of `all_states`: all engines sequentially, as imports take longest."""
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    rows = []
    for stage, offload, wide in stages():
        rows += engine_states(stage, offload, wide)
        torch.distributed.barrier()
    return rows


def engine_states(stage, offload, wide):
    """Return the rows of one engine: bytes allocated since before, in two steps of training."""
    import torch
    from rlhf_stack.memory import Zero, model_states

    model = memory_peaks.model_of(SMALL)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    before = allocated() - 2 * parameters
    engine = deepspeed_engine(model, stage, offload, wide)

    def train():
        tokens = torch.randint(0, SMALL.vocabulary, (1, 8))
        engine.backward(engine(tokens).logits.float().pow(2).mean())

    train()
    engine.step()
    train()
    with_gradients = allocated() - before
    engine.step()
    after_step = allocated() - before
    found = model_states(parameters, Zero(stage, RANKS, offload, fp32_gradients=wide))
    name = f"ZeRO {stage}{', offload' if offload else ''}"
    bucket = engine.zero_reduce_bucket_size() * 2
    freed = 0 if stage == 3 or offload else found.gradients  # otherwise their buffer stays allocated
    rows = [row(f"{name}: after a step", found.held - freed + found.host, after_step)]
    rows.append(row(f"{name}: with gradients", found.held + found.host, with_gradients))
    for one in rows:  # a bucket that stays allocated belongs to the buffers
        one["measured"] -= bucket if one["measured"] > bucket else 0
    engine.destroy()
    return rows


def allocated():
    """Return the bytes of the storages of all tensors in this process, each counted once."""
    import torch

    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def deepspeed_engine(model, stage, offload, wide):
    """Return a DeepSpeed engine as OpenRLHF configures it, with the optimiser that this distribution uses."""
    import deepspeed
    from rlhf_stack.compat import deepspeed_ops

    gradients = "fp32" if wide else None
    options = {"adam_offload": offload, "stage": stage, "zpg": 1, "grad_accum_dtype": gradients}
    batch = {"train_micro_batch_size_per_gpu": 1, "train_batch_size": RANKS}
    try:
        from openrlhf.utils.deepspeed.deepspeed_utils import get_train_ds_config
    except ModuleNotFoundError:
        from openrlhf.utils.deepspeed_utils import get_train_ds_config

        optimizer = deepspeed_ops.adam_class(offload)(model.parameters(), lr=1e-5)
        config = get_train_ds_config(False, **options) | batch
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    adam = {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}
    section = deepspeed_ops.optimizer_config({"type": "AdamW", "params": adam}, offload)
    config = get_train_ds_config(False, **options, optim_config=section) | batch
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def cache():
    """Measure the blocks of vLLM's KV cache on a CPU, whose size in GiB is set by a variable."""
    from rlhf_stack.memory import EngineSettings
    from rlhf_stack.memory.engine import blocks, token_bytes

    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(CACHE_GIB)
    rows = []
    for name, shape in ENGINES.items():
        with tempfile.TemporaryDirectory() as folder:
            memory_peaks.config_of(shape).save_pretrained(folder)
            config = json.loads(Path(folder, "config.json").read_text())
            Path(folder, "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
            found, block = engine_blocks(folder)
        engine = EngineSettings(1, 1.0, LENGTH, block)
        size = token_bytes(shape, 1) * block
        rows.append(row(f"cache, {name}", blocks(shape, engine, CACHE_GIB << 30) * size, found * size))
    return rows


def engine_blocks(folder):
    """Return an engine's number of blocks, and the tokens per block."""
    from vllm import LLM

    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=LENGTH,
    )
    engine = llm.llm_engine
    cache_config = getattr(engine, "cache_config", None) or engine.vllm_config.cache_config
    return cache_config.num_gpu_blocks, cache_config.block_size


if __name__ == "__main__":
    sys.exit(main())
