"""The memory of a training run on one GPU: what `plan` foretells, against what the driver reports.

``python planned_run.py OUT`` inside an image, next to one GPU, writes OUT/planned-run.json and OUT/train.log.
A random model of the shapes of Qwen3-1.7B and its engine share the GPU and sleep in turn; its weights are
compared after each sync. SIGTERM ends it with what was read so far. ``--small`` is for a CPU, which has no
such memory: it shows that the run works.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.demo import digit_reward
from rlhf_stack.telemetry import events
from rlhf_stack.telemetry.traces import ORDER, PREFIX, TOTAL
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from vllm.third_party import pynvml

STEPS, SAMPLES = 2, 4
PERIOD = 0.1  # s between two readings of the driver
GPU = 0
INTERRUPTED = 130


@dataclass(frozen=True)
class Size:
    """The model's shapes, and the tokens of prompts and responses."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    prompts: int
    response: int


LARGE = Size(2048, 6144, 28, 16, 8, 128, 151936, prompts=32, response=512)
SMALL = Size(64, 128, 2, 2, 2, 32, 512, prompts=8, response=16)


def make(folder: Path, size: Size) -> None:
    """Write a model with random weights, a tokenizer with a word for each token, and prompts."""
    words = {"<pad>": 0, "<eos>": 1, "<bos>": 2} | {f"w{token}": token for token in range(3, size.vocabulary)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))  # noqa: S106
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=4096, **special).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    torch.manual_seed(0)
    with torch.device(devices.torch_device()):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    choose = random.Random(0)  # noqa: S311
    rows = [
        json.dumps({"input": " ".join(f"w{choose.randrange(3, size.vocabulary)}" for _ in range(32))})
        for _ in range(STEPS * size.prompts)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def arguments(folder: Path, size: Size) -> list[str]:
    """Flags of OpenRLHF 0.11 as in its published scripts, for one GPU that trainer and engine share."""
    batch = str(size.prompts * SAMPLES)
    return [
        *("--actor.num_nodes", "1", "--actor.num_gpus_per_node", "1"),
        *("--vllm.num_engines", "1", "--vllm.tensor_parallel_size", "1", "--vllm.enforce_eager"),
        *("--vllm.gpu_memory_utilization", "0.4" if devices.is_gpu() else "0.1"),
        *("--train.colocate_all", "--vllm.enable_sleep", "--ds.enable_sleep", "--ds.zero_stage", "2"),
        *("--ds.attn_implementation", "flash_attention_2", "--ds.packing_samples"),
        *("--actor.model_name_or_path", str(folder), "--actor.gradient_checkpointing_enable"),
        *("--data.prompt_dataset", str(folder / "prompts.jsonl"), "--data.input_key", "input"),
        *("--data.max_samples", str(STEPS * size.prompts), "--data.max_len", str(32 + size.response)),
        *("--reward.remote_url", digit_reward.__file__, "--algo.kl.init_coef", "0"),
        *("--algo.advantage.estimator", "reinforce_baseline", "--actor.adam.lr", "1e-6"),
        *("--rollout.batch_size", str(size.prompts), "--rollout.n_samples_per_prompt", str(SAMPLES)),
        *("--rollout.max_new_tokens", str(size.response), "--rollout.micro_batch_size", "8"),
        *("--train.batch_size", batch, "--train.micro_batch_size", "8"),
        *("--ckpt.output_dir", str(folder / "trained"), "--ckpt.path", str(folder / "checkpoints")),
    ]


def planned(flags: Sequence[str]) -> Mapping[str, Any]:
    """Bytes that `plan` foretells for the GPU, by phase."""
    total = torch.cuda.mem_get_info()[1] if devices.is_gpu() else 8 << 30
    machine = ["--nodes", "1", "--gpus", "1", "--gpu-memory", f"{total / 2**30:.2f}"]
    run = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *flags]
    done = subprocess.run(
        ["rlhf-stack", "plan", "--json", *machine, "--", *run], capture_output=True, text=True, check=False
    )
    found = json.loads(done.stdout)
    return {"fits": found["fits"], "problems": found["problems"], "gpu": found["nodes"][0]["gpus"][0]}


def watch(ended: threading.Event, readings: list[tuple[float, int]]) -> None:
    """Append the time and the bytes of the GPU in use, by its driver, until ``ended`` is set."""
    if not devices.is_gpu():
        return
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(GPU)
    while not ended.wait(PERIOD):
        readings.append((time.time(), int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used)))


def windows(found: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """The phases of each step with their begin and end, which follow from the order of the phases."""
    for event in found:
        if event["event"] == "step" and TOTAL in event:
            at = event["time"] - event[TOTAL]
            for name in ORDER:
                seconds = event.get(PREFIX + name, 0.0)
                yield name, at, at + seconds
                at += seconds


def peaks(
    found: Sequence[Mapping[str, Any]], readings: Sequence[tuple[float, int]]
) -> dict[str, dict[str, float]]:
    """The most bytes that were used in each phase, and its longest seconds."""
    result: dict[str, dict[str, float]] = {}
    for name, begin, end in windows(found):
        before = result.get(name, {"bytes": 0, "seconds": 0.0})
        most = max((size for when, size in readings if begin <= when <= end), default=0)
        result[name] = {
            "bytes": max(before["bytes"], most),
            "seconds": round(max(before["seconds"], end - begin), 2),
        }
    return result


def train(out: Path, flags: Sequence[str], written: Path) -> int:
    """Train on a Ray cluster of this machine, with comparison of the weights; return the exit code."""
    variables = {env_vars.VERIFY_SYNC: "1", env_vars.EVENTS: str(written), "HF_HUB_OFFLINE": "1"}
    start = ["ray", "start", "--head", "--num-gpus", "1", "--disable-usage-stats"]
    subprocess.run([*start, "--include-dashboard=false"], check=True, stdout=subprocess.DEVNULL)
    program = [sys.executable, "-m", "rlhf_stack.certify.training", "auto", json.dumps(variables), *flags]
    with (out / "train.log").open("wb") as log:
        return subprocess.call(program, stdout=log, stderr=subprocess.STDOUT)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    options = parser.parse_args()
    size = SMALL if options.small else LARGE
    folder, written = options.out / "model", options.out / "events"
    folder.mkdir(parents=True)
    make(folder, size)
    flags = arguments(folder, size)
    plan = planned(flags)
    readings: list[tuple[float, int]] = []
    ended, start = threading.Event(), time.monotonic()
    watching = threading.Thread(target=watch, args=(ended, readings))
    watching.start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = train(options.out, flags, written)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        ended.set()
        watching.join()
    found = events.read(written)
    kept = [event for event in found if event["event"] in ("step", "sync", "verify", "engine")]
    report = {
        "code": code,
        "seconds": round(time.monotonic() - start, 1),
        "plan": plan,
        "before": readings[0][1] if readings else 0,
        "measured": peaks(found, readings),
        "events": kept,
    }
    text = json.dumps(report, indent=1)
    (options.out / "planned-run.json").write_text(text + "\n", encoding="utf-8")
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
