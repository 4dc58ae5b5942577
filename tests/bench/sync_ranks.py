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
from pathlib import Path
from typing import Any

import ray
import torch
from rlhf_stack import sync
from rlhf_stack.cluster.host import free_port
from rlhf_stack.config import env_vars
from rlhf_stack.sync import encoding
from rlhf_stack.sync.buckets import ParameterSpec, plan_buckets
from rlhf_stack.sync.engine_parameters import parameter_spec
from rlhf_stack.sync.reads import Reads
from rlhf_stack.sync.receiving import receive
from rlhf_stack.sync.sending import new_sender

HIDDEN, HEADS, LAYERS, INNER, WORDS, LORA = 896, 128, 24, 4864, 151936, 16
DTYPE = torch.bfloat16
Shapes = list[tuple[str, tuple[int, ...]]]
Action = Callable[[str], list[int]]  # of a model; returns the peaks of the ranks
SYNCS = ("full", "whole", "sharded", "kept", "changed")  # in this order: a full sync frees what is kept
ON_LINK = ("raw", "one_by_one", "full", "kept", "changed")
ROWS = ("o.weight", "down.weight")  # tensor parallelism splits their columns
CLEAR_REFS = Path("/proc/self/clear_refs")


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


def layers() -> Shapes:
    """Return the shapes of four of its layers, for a link over which the whole model takes minutes."""
    return [(name, shape) for name, shape in half_billion() if name.split(".")[0] in set("0123")]


MODELS = {"0.5B": half_billion, "LoRA": lora, "four layers": layers}
CHANGED = 0.01  # of the elements, in the last bit


class Rank:
    """One end of syncs: the trainer's rank 0 or a worker, with the weights of some models."""

    def __init__(self, host: str, port: int, rank: int, world: int, models: Sequence[str]) -> None:
        torch.set_num_threads(1)
        self.group: Any = sync.create_group(host, port, rank, world, torch.device("cpu"), "gloo")
        self.weights = {
            model: [(name, torch.ones(shape, dtype=DTYPE)) for name, shape in MODELS[model]()]
            for model in models
        }
        self.flat = {model: torch.ones(self.bytes_of(model), dtype=torch.uint8) for model in models}
        self.generator = torch.Generator().manual_seed(0)
        self.sent = self.copied = 0
        self.shard, self.shards = max(rank - 1, 0), world - 1
        self.reads: dict[str, Reads] = {}

    def bytes_of(self, model: str) -> int:
        """Return the bytes of a model."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self.weights[model])

    def specs(self, model: str) -> list[ParameterSpec]:
        """Return the specs of a model's parameters."""
        return [parameter_spec(name, tensor) for name, tensor in self.weights[model]]

    def train(self, model: str) -> None:
        """Change the last bit of some elements of every parameter."""
        for _, tensor in self.weights[model]:
            count = int(CHANGED * tensor.numel())
            chosen = torch.randint(0, tensor.numel(), (count,), generator=self.generator)
            tensor.view(torch.int16).view(-1)[chosen] ^= 1

    def raw(self, model: str) -> None:
        """Broadcast as many bytes over gloo, once."""
        self.group.broadcast(self.flat[model], src=0, stream=None)

    def one_by_one(self, model: str) -> None:
        """Broadcast each parameter, and wait until the last rank has it: the transfers of upstream's loop."""
        for _, tensor in self.weights[model]:
            self.group.broadcast(tensor, src=0, stream=None)
            self.barrier()

    def barrier(self) -> None:
        """Wait until the last worker calls it."""
        self.group.broadcast(torch.ones(1), src=self.group._members.world - 1, stream=None)

    def own_shard(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return what this worker holds of a weight if all workers are one engine with tensor parallelism."""
        if "norm" in name or (whole.ndim == 1 and name.endswith(ROWS)):
            return whole
        return whole.chunk(self.shards, dim=1 if name.endswith(ROWS) else 0)[self.shard]

    def sync_shard(self, model: str, reads: Reads | None) -> None:
        """Run this rank's side of a sync to one engine, whose loader keeps the tensors, as vLLM's."""
        if not self.group.rank:
            self.sync(model, encoding.FULL)
            return
        held = {name: self.own_shard(name, whole) for name, whole in self.weights[model]}

        def load(views: Sequence[tuple[str, torch.Tensor]]) -> None:
            for name, view in views:
                held[name].copy_(self.own_shard(name, view))

        content = [astuple(parameter) for parameter in self.specs(model)]
        report = receive(
            [self.group],
            content,
            env_vars.sync_bucket(),
            self.group.device,
            load,
            DTYPE,
            encoding.FULL,
            load_keeps=True,
            reads=reads,
        )
        if reads is not None:
            reads.ended()
        self.copied = report["copied"]

    def whole(self, model: str) -> None:
        """Send all weights to one engine, each of whose workers copies all of them."""
        self.sync_shard(model, None)

    def sharded(self, model: str) -> None:
        """Send all weights to one engine, each of whose workers copies its shard, after the first sync."""
        self.sync_shard(model, self.reads.setdefault(model, Reads()))

    def sync(self, model: str, encoding: str) -> None:
        """Run this rank's side of a sync; a worker's loader copies."""
        weights, specs = self.weights[model], self.specs(model)
        if self.group.rank:
            held = dict(weights)

            def load(views: Sequence[tuple[str, torch.Tensor]]) -> None:
                for name, view in views:
                    held[name].copy_(view)

            content = [astuple(parameter) for parameter in specs]
            receive([self.group], content, env_vars.sync_bucket(), self.group.device, load, DTYPE, encoding)
            return
        with self.group.syncing():
            buckets = plan_buckets(specs, env_vars.sync_bucket())
            sender = new_sender(self.group, encoding, buckets, in_place=True)
            for number, bucket in enumerate(buckets):
                sender.send(number, bucket, [weights[span.index][1] for span in bucket.spans])
            sender.finish()
        self.sent = sender.sent

    def full(self, model: str) -> None:
        """Send all weights."""
        self.sync(model, encoding.FULL)

    def kept(self, model: str) -> None:
        """Send all weights, which every node keeps."""
        self.sync(model, encoding.KEPT)

    def changed(self, model: str) -> None:
        """Send what changed since `kept`."""
        self.sync(model, encoding.CHANGED)

    def peak_of(self, method: str, model: str) -> int:
        """Run a method; return by how many bytes this process's resident memory grew at most."""
        CLEAR_REFS.write_text("5")
        before = status("VmRSS")
        getattr(self, method)(model)
        return status("VmHWM") - before

    def bytes_copied(self) -> int:
        """Return the bytes that the last sync of `sharded` or `whole` copied into this worker."""
        return self.copied

    def update_weight(self, name: str, shape: tuple[int, ...], model: str) -> None:
        """Receive one parameter as upstream's worker does."""
        weight = torch.empty(shape, dtype=DTYPE)
        self.group.broadcast(weight, src=0, stream=None)
        dict(self.weights[model])[name].copy_(weight)


def status(field: str) -> int:
    """Return bytes of this process from its status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def loopback(workers: int, models: Sequence[str], repeat: int) -> dict[str, Any]:
    """Return the seconds and peaks of each method, by model, for ``workers`` Ray actors on this machine."""
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    port, world = free_port("127.0.0.1"), workers + 1
    actors = [ray.remote(Rank).remote("127.0.0.1", port, rank, world, models) for rank in range(1, world)]
    trainer = Rank("127.0.0.1", port, 0, world, models)

    def on_all_ranks(method: str) -> Action:
        def action(model: str) -> list[int]:
            references = [actor.peak_of.remote(method, model) for actor in actors]
            return [trainer.peak_of(method, model), *ray.get(references)]

        return action

    def upstream(model: str) -> list[int]:
        for name, tensor in trainer.weights[model]:
            references = [actor.update_weight.remote(name, tuple(tensor.shape), model) for actor in actors]
            trainer.group.broadcast(tensor, src=0, stream=None)
            ray.get(references)
        return []

    methods = {"upstream": upstream} | {name: on_all_ranks(name) for name in ("raw", *SYNCS)}

    def measured(model: str) -> dict[str, Any]:
        found = side_by_side(trainer, methods, model, repeat)
        return found | {"copied": max(ray.get([actor.bytes_copied.remote() for actor in actors]))}

    return {model: measured(model) for model in models}


def side_by_side(trainer: Rank, methods: dict[str, Action], model: str, repeat: int) -> dict[str, Any]:
    """Return the median seconds of each method, measured alternately after an uncounted first run."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    peaks: dict[str, list[int]] = {}
    for number in range(repeat + 1):
        for name, action in methods.items():
            if name == "changed":
                trainer.train(model)
            start = time.perf_counter()
            taken = action(model)
            if number:
                times[name].append(time.perf_counter() - start)
                peaks[name] = taken
    seconds = {name: statistics.median(found) for name, found in times.items()}
    return {"seconds": seconds, "peaks": peaks, "bytes": trainer.bytes_of(model), "sent": trainer.sent}


def link(host: str, port: int, ranks: Sequence[int], world: int, model: str, repeat: int) -> dict[str, Any]:
    """Run some ranks at one end of a link; rank 0 measures, also a plain stream of the same bytes."""
    if ranks[0]:
        ends = [
            multiprocessing.Process(target=follow, args=(host, port, rank, world, model, repeat))
            for rank in ranks
        ]
        for end in ends:
            end.start()
        for end in ends:
            end.join()
        return {}
    with socket.create_server((host, port + 1)) as server:
        trainer = Rank(host, port, 0, world, [model])
        connection, _ = server.accept()
    content = memoryview(trainer.flat[model].numpy())

    def plain(_: str) -> list[int]:
        connection.sendall(content)
        connection.recv(1)
        return []

    def finished(method: str) -> Action:
        def action(_: str) -> list[int]:
            getattr(trainer, method)(model)
            trainer.barrier()
            return []

        return action

    methods = {"plain": plain} | {name: finished(name) for name in ON_LINK}
    return {model: side_by_side(trainer, methods, model, repeat)}


def follow(host: str, port: int, rank: int, world: int, model: str, repeat: int) -> None:
    """Run a worker at the far end of a link."""
    worker = Rank(host, port, rank, world, [model])
    stream = socket.create_connection((host, port + 1)) if rank == world - 1 else None
    buffer = memoryview(bytearray(worker.bytes_of(model)))
    for _ in range(repeat + 1):
        if stream:
            remaining = len(buffer)
            while remaining:
                remaining -= stream.recv_into(buffer[-remaining:])
            stream.sendall(b".")
        for method in ON_LINK:
            getattr(worker, method)(model)
            worker.barrier()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--repeat", type=int, required=True)
    parser.add_argument("--host", help="the trainer's address; without it both ends run on this machine")
    parser.add_argument("--port", type=int, default=29600)
    parser.add_argument("--far", action="store_true", help="run the workers' end of the link")
    parser.add_argument("--models", nargs="+", choices=MODELS, required=True)
    options = parser.parse_args()
    if not options.host:
        print(json.dumps(loopback(options.workers, options.models, options.repeat)))
        return
    ranks = range(1, options.workers + 1) if options.far else [0]
    (model,) = options.models
    found = link(options.host, options.port, ranks, options.workers + 1, model, options.repeat)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
