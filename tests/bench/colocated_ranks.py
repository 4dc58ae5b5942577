"""The part of `tests.bench.colocated` inside an image: trainer ranks and engines are Ray actors.

In an image for GPUs each trainer rank shares a GPU with an engine; ``--gpus`` above their number lets several
such pairs share one.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import ray
import torch
import torch.distributed as dist
from rlhf_stack.accelerator import devices
from rlhf_stack.cluster.host import free_port
from rlhf_stack.config import env_vars
from rlhf_stack.sync import same_gpu
from rlhf_stack.sync.buckets import plan_buckets
from rlhf_stack.sync.engine_parameters import parameter_spec
from rlhf_stack.sync.receiving import receive
from rlhf_stack.sync.sending import BucketSender
from torch.multiprocessing.reductions import reduce_tensor

HIDDEN, HEADS, LAYERS, INNER, WORDS, LORA = 896, 128, 24, 4864, 151936, 16
ROWS = {"q": HIDDEN, "k": HEADS, "v": HEADS, "o": HIDDEN, "gate": INNER, "up": INNER, "down": INNER}
DTYPE = torch.bfloat16
Weights = list[tuple[str, torch.Tensor]]


def half_billion() -> Weights:
    """Return weights of the shapes of Qwen2 0.5B, without its biases and norms."""
    shapes = {f"{layer}.{name}": (rows, HIDDEN) for layer in range(LAYERS) for name, rows in ROWS.items()}
    shapes = {"embed": (WORDS, HIDDEN)} | shapes
    device = devices.torch_device()
    return [(name, torch.ones(shape, dtype=DTYPE, device=device)) for name, shape in shapes.items()]


def lora() -> Weights:
    """Return adapters of rank 16 for the same matrices."""
    return [
        (f"{name}.{side}", torch.ones((LORA, size), dtype=DTYPE, device=whole.device))
        for name, whole in half_billion()[1:]
        for side, size in zip("AB", whole.shape, strict=True)
    ]


def experts() -> Weights:
    """Return the experts of a small mixture: 8 layers of 64, of three matrices each."""
    device = devices.torch_device()
    sizes = {"gate": (256, 512), "up": (256, 512), "down": (512, 256)}
    return [
        (f"{layer}.{expert}.{name}", torch.ones(size, dtype=DTYPE, device=device))
        for layer in range(8)
        for expert in range(64)
        for name, size in sizes.items()
    ]


MODELS = {"0.5B": half_billion, "LoRA": lora, "experts": experts}


class Engine:
    """An engine with one worker, on the GPU of a trainer rank."""

    def __init__(self, gpu: int) -> None:
        self._gpu = str(gpu)
        self._held = {model: dict(new()) for model, new in MODELS.items()}
        self._group: Any = None

    def join(self, offers: dict[str, str]) -> None:
        """Join the trainer rank on this GPU."""
        self._group = same_gpu.join(offers, self._gpu, f"the engine on GPU {self._gpu}")

    def receive(self, model: str, content: Sequence[Any]) -> None:
        """Receive a model in buckets."""
        held = self._held[model]

        def load(views: Sequence[tuple[str, torch.Tensor]]) -> None:
            for name, view in views:
                held[name].copy_(view)

        receive([self._group], content, env_vars.sync_bucket(), self._group.device, load, DTYPE)

    def update_weight(self, model: str, name: str, handles: dict[str, Any]) -> None:
        """Receive one parameter as upstream's engine does."""
        whole, handle = self._held[model][name], handles[self._gpu]
        if devices.is_gpu():
            whole.copy_(devices.open_handle(handle, torch.cuda.current_device()))
            torch.cuda.synchronize()
            return
        storage = torch.UntypedStorage._new_shared_filename_cpu(*handle)
        whole.copy_(torch.empty(0, dtype=DTYPE).set_(storage, 0, whole.shape))


class Trainer:
    """A trainer rank; rank 0 calls the engines."""

    def __init__(self, rank: int, engines: Sequence[Any], port: int) -> None:
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, len(engines), rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=len(engines))
        self._rank, self._engines = rank, engines
        self._weights = {model: new() for model, new in MODELS.items()}
        self._offer = same_gpu.Offer(str(rank), f"trainer rank {rank}")
        self._group: Any = None

    def address(self) -> str:
        """Return what the engine on this GPU connects to."""
        return self._offer.address

    def accept(self) -> None:
        """Wait for the engine."""
        self._group = self._offer.accept()

    def ours(self, model: str) -> None:
        """Send a model in buckets to the engine on this GPU."""
        weights = self._weights[model]
        specs = [parameter_spec(*each) for each in weights]
        with self._group.syncing():
            content = [astuple(spec) for spec in specs]
            engines = self._engines if self._rank == 0 else []
            references = [engine.receive.remote(model, content) for engine in engines]
            sender = BucketSender(self._group, in_place=False)
            for number, bucket in enumerate(plan_buckets(specs, env_vars.sync_bucket())):
                sender.send(number, bucket, [weights[span.index][1] for span in bucket.spans])
            sender.finish()
            ray.get(references)
        dist.barrier()

    def one_by_one(self, model: str) -> None:
        """Send a model as upstream does: per parameter a handle of every rank, a call and a barrier."""
        for name, tensor in self._weights[model]:
            copied = tensor.clone()
            handles: list[Any] = [None] * len(self._engines)
            handle: Any = _handle(copied)
            dist.all_gather_object(handles, {str(self._rank): handle})
            if self._rank == 0:
                merged = {gpu: each for found in handles for gpu, each in found.items()}
                ray.get([engine.update_weight.remote(model, name, merged) for engine in self._engines])
            dist.barrier()

    def facts(self, model: str) -> dict[str, int]:
        """Return the number of parameters and bytes of a model."""
        sizes = [tensor.numel() * tensor.element_size() for _, tensor in self._weights[model]]
        return {"parameters": len(sizes), "bytes": sum(sizes)}


def _handle(tensor: torch.Tensor) -> Any:
    """Return what another process opens ``tensor`` with, without a copy."""
    return reduce_tensor(tensor) if devices.is_gpu() else tensor.untyped_storage()._share_filename_cpu_()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--repeat", type=int, required=True)
    options = parser.parse_args()
    ray.init(num_cpus=2 * options.gpus, include_dashboard=False, log_to_driver=False)
    port, gpus = free_port("127.0.0.1"), range(options.gpus)
    total = torch.cuda.device_count() if devices.is_gpu() else 0
    part = {"num_gpus": total / (2 * options.gpus)}
    engines = [ray.remote(Engine).options(**part).remote(gpu) for gpu in gpus]
    trainers = [ray.remote(Trainer).options(**part).remote(gpu, engines, port) for gpu in gpus]
    addresses = ray.get([trainer.address.remote() for trainer in trainers])
    offers = {str(gpu): address for gpu, address in zip(gpus, addresses, strict=True)}
    joining = [engine.join.remote(offers) for engine in engines]
    ray.get([*joining, *(trainer.accept.remote() for trainer in trainers)])
    found: dict[str, Any] = {}
    for model in MODELS:
        times: dict[str, list[float]] = {"ours": [], "one_by_one": []}
        for _ in range(options.repeat + 1):
            for method, taken in times.items():
                start = time.perf_counter()
                ray.get([getattr(trainer, method).remote(model) for trainer in trainers])
                taken.append(time.perf_counter() - start)
        found[model] = {method: statistics.median(taken[1:]) for method, taken in times.items()}
        found[model] |= ray.get(trainers[0].facts.remote(model))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
