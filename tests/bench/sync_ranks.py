"""The part of `tests.bench.sync` inside an image: times syncs between processes; prints JSON.

Over loopback workers are Ray actors; over a link its two ends are processes in two containers.
"""

import argparse
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import ray
import torch
from rlhf_stack import sync
from rlhf_stack.config import env_vars
from rlhf_stack.sync.buckets import ParameterSpec, plan_buckets
from rlhf_stack.sync.receiving import receive
from rlhf_stack.sync.sending import BucketSender, parameter_spec

HIDDEN, HEADS, LAYERS, INNER, WORDS, LORA = 896, 128, 24, 4864, 151936, 16
DTYPE = torch.bfloat16
Shapes = list[tuple[str, tuple[int, ...]]]


def half_billion() -> Shapes:
    """Return the shapes of Qwen2 0.5B: 494 million parameters."""
    layer = [
        ("q.weight", (HIDDEN, HIDDEN)),
        ("q.bias", (HIDDEN,)),
        ("k.weight", (HEADS, HIDDEN)),
        ("k.bias", (HEADS,)),
        ("v.weight", (HEADS, HIDDEN)),
        ("v.bias", (HEADS,)),
        ("o.weight", (HIDDEN, HIDDEN)),
        ("gate.weight", (INNER, HIDDEN)),
        ("up.weight", (INNER, HIDDEN)),
        ("down.weight", (HIDDEN, INNER)),
        ("norm1.weight", (HIDDEN,)),
        ("norm2.weight", (HIDDEN,)),
    ]
    whole: Shapes = [("embed.weight", (WORDS, HIDDEN)), ("norm.weight", (HIDDEN,))]
    return whole + [(f"{index}.{name}", shape) for index in range(LAYERS) for name, shape in layer]


def lora() -> Shapes:
    """Return the shapes of adapters for the same model's linear layers: hundreds of small tensors."""
    matrices = [(name, shape) for name, shape in half_billion() if len(shape) == 2 and name[0].isdigit()]
    return [
        (f"{name}.{side}", (LORA, shape[1]) if side == "A" else (shape[0], LORA))
        for name, shape in matrices
        for side in "AB"
    ]


MODELS = {"0.5B": half_billion, "LoRA": lora}
LINKED = "0.5B"


class Rank:
    """One end of syncs: the trainer's rank 0 or a worker, with the weights of every model."""

    def __init__(self, host: str, port: int, rank: int, world: int) -> None:
        torch.set_num_threads(1)
        self.group = sync.create_group(host, port, rank, world, torch.device("cpu"), "gloo")
        self.weights = {
            model: [(name, torch.ones(shape, dtype=DTYPE)) for name, shape in shapes()]
            for model, shapes in MODELS.items()
        }
        self.flat = {model: torch.ones(self.bytes_of(model), dtype=torch.uint8) for model in MODELS}

    def bytes_of(self, model: str) -> int:
        """Return the bytes of a model."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.weights[model])

    def specs(self, model: str) -> list[ParameterSpec]:
        """Return the specs of a model's parameters."""
        return [parameter_spec(name, tensor) for name, tensor in self.weights[model]]

    def raw(self, model: str) -> None:
        """Broadcast as many bytes over gloo, once."""
        self.group.broadcast(self.flat[model], src=0, stream=None)

    def send(self, model: str) -> None:
        """Run the trainer's side of a sync."""
        parameters, specs = self.weights[model], self.specs(model)
        with self.group.syncing():
            sender = BucketSender(self.group, in_place=True)
            for number, bucket in enumerate(plan_buckets(specs, env_vars.sync_bucket())):
                sender.send(number, bucket, [parameters[span.index][1] for span in bucket.spans])
            sender.finish()

    def receive(self, model: str) -> None:
        """Run a worker's side of a sync, with a loader that copies."""
        held = dict(self.weights[model])

        def load(views: Sequence[tuple[str, torch.Tensor]]) -> None:
            for name, view in views:
                held[name].copy_(view)

        content = [astuple(parameter) for parameter in self.specs(model)]
        receive(self.group, content, env_vars.sync_bucket(), self.group.device, load, DTYPE)

    def update_weight(self, name: str, shape: tuple[int, ...], model: str) -> None:
        """Receive one parameter as upstream's worker does."""
        weight = torch.empty(shape, dtype=DTYPE)
        self.group.broadcast(weight, src=0, stream=None)
        dict(self.weights[model])[name].copy_(weight)


def loopback(workers: int, repeat: int) -> dict[str, Any]:
    """Return the seconds of each method, by model, for ``workers`` Ray actors on this machine."""
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    port, world = free_port(), workers + 1
    actors = [ray.remote(Rank).remote("127.0.0.1", port, rank, world) for rank in range(1, world)]
    trainer = Rank("127.0.0.1", port, 0, world)

    def on_all_ranks(method: str, own: Callable[[str], None], model: str) -> None:
        references = [getattr(actor, method).remote(model) for actor in actors]
        own(model)
        ray.get(references)

    def upstream(model: str) -> None:
        for name, tensor in trainer.weights[model]:
            references = [actor.update_weight.remote(name, tuple(tensor.shape), model) for actor in actors]
            trainer.group.broadcast(tensor, src=0, stream=None)
            ray.get(references)

    methods: dict[str, Callable[[str], None]] = {
        "raw": lambda model: on_all_ranks("raw", trainer.raw, model),
        "ours": lambda model: on_all_ranks("receive", trainer.send, model),
        "upstream": upstream,
    }
    return {
        model: side_by_side(methods, model, repeat) | {"bytes": trainer.bytes_of(model)} for model in MODELS
    }


def side_by_side(methods: dict[str, Callable[[str], None]], model: str, repeat: int) -> dict[str, float]:
    """Return the median seconds of each method, measured alternately after an uncounted first run."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(repeat + 1):
        for name, action in methods.items():
            start = time.perf_counter()
            action(model)
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def link(host: str, port: int, ranks: Sequence[int], world: int, repeat: int) -> dict[str, Any]:
    """Run some ranks at one end of a link; rank 0 measures, also a plain stream of the same bytes."""
    if ranks[0]:
        ends = [
            multiprocessing.Process(target=follow, args=(host, port, rank, world, repeat)) for rank in ranks
        ]
        for end in ends:
            end.start()
        for end in ends:
            end.join()
        return {}
    with socket.create_server((host, port + 1)) as server:
        trainer = Rank(host, port, 0, world)
        connection, _ = server.accept()
    content = memoryview(trainer.flat[LINKED].numpy())

    def plain(_: str) -> None:
        connection.sendall(content)
        connection.recv(1)

    def ours(model: str) -> None:
        trainer.send(model)
        trainer.group.broadcast(
            torch.ones(1), src=world - 1, stream=None
        )  # until the last worker has finished

    found = side_by_side({"plain": plain, "ours": ours, "raw": trainer.raw}, LINKED, repeat)
    return {LINKED: found | {"bytes": trainer.bytes_of(LINKED)}}


def follow(host: str, port: int, rank: int, world: int, repeat: int) -> None:
    """Run a worker at the far end of a link."""
    worker = Rank(host, port, rank, world)
    stream = socket.create_connection((host, port + 1)) if rank == world - 1 else None
    buffer = memoryview(bytearray(worker.bytes_of(LINKED)))
    for _ in range(repeat + 1):
        if stream:
            remaining = len(buffer)
            while remaining:
                remaining -= stream.recv_into(buffer[-remaining:])
            stream.sendall(b".")
        worker.receive(LINKED)
        worker.group.broadcast(torch.ones(1), src=world - 1, stream=None)
        worker.raw(LINKED)


def free_port() -> int:
    """Return a port that is unused now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--repeat", type=int, required=True)
    parser.add_argument("--host", help="the trainer's address; without it both ends run on this machine")
    parser.add_argument("--port", type=int, default=29600)
    parser.add_argument("--far", action="store_true", help="run the workers' end of the link")
    options = parser.parse_args()
    if not options.host:
        print(json.dumps(loopback(options.workers, options.repeat)))
        return
    ranks = range(1, options.workers + 1) if options.far else [0]
    print(json.dumps(link(options.host, options.port, ranks, options.workers + 1, options.repeat)))


if __name__ == "__main__":
    main()
