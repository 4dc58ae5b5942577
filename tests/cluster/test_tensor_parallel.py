"""Syncs of weights that DeepSpeed's tensor parallelism shards: two trainer ranks, and an engine worker."""

import os
import signal
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ports import free_port
from ranks import FORK, as_bits
from rlhf_stack import sync
from rlhf_stack.config import env_vars
from rlhf_stack.sync import sending
from rlhf_stack.sync.receiving import receive

TRAINERS, DEADLINE = 2, 4
CUT = {"column": 0, "row": 1, "norm": None}  # the dimension that is sharded
SHAPES = {"column": (48, 32), "row": (32, 48), "norm": (33,)}
LAYERS = 3


class GatherReplacedLayerParams:
    """Takes the place of DeepSpeed's, for parameters with an attribute ``cut``; ``gathered`` counts them."""

    gathered = 0

    def __init__(self, parameters, _):
        (self.parameter,) = parameters

    def __enter__(self):
        type(self).gathered += 1
        self.shard = self.parameter.data
        if self.parameter.cut is not None:
            parts = [torch.empty_like(self.shard) for _ in range(TRAINERS)]
            dist.all_gather(parts, self.shard.contiguous())
            self.parameter.data = torch.cat(parts, self.parameter.cut)

    def __exit__(self, *_):
        self.parameter.data = self.shard


def whole_weights():
    """The weights of all layers, the same in each process."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"{name}{layer}": torch.randn(shape, generator=generator)
        for layer in range(LAYERS)
        for name, shape in SHAPES.items()
    }


def trainer_of(rank, called):
    """A trainer with its shards; ``called`` gets what engines are asked to receive."""
    module = torch.nn.Module()
    for name, whole in whole_weights().items():
        cut = CUT[name[:-1]]
        shard = whole if cut is None else whole.chunk(TRAINERS, cut)[rank]
        module.register_parameter(name, torch.nn.Parameter(shard.contiguous()))
        getattr(module, name).cut = cut
    engine = SimpleNamespace(
        receive_weights=SimpleNamespace(remote=lambda content, limit, *_, **__: called.put((content, limit)))
    )
    arguments = SimpleNamespace(ds=SimpleNamespace(zero_stage=2, tensor_parallel_size=TRAINERS))
    return SimpleNamespace(
        actor=SimpleNamespace(model=SimpleNamespace(module=module)),
        strategy=SimpleNamespace(args=arguments),
        vllm_engines=[engine],
    )


class Sync:
    """A sync between processes, which report what they return or raise."""

    def __init__(self, stopped=""):
        self.results, self.called, self.stopped = FORK.Queue(), FORK.Queue(), stopped
        self.ports = free_port(), free_port()
        targets = {"trainer 0": (self.train, 0), "trainer 1": (self.train, 1), "worker": (self.work,)}
        self.processes = [
            FORK.Process(target=self.run, args=(who, *of), daemon=True) for who, of in targets.items()
        ]

    def run(self, who, target, *arguments):
        try:
            result = target(*arguments)
        except Exception as error:
            result = str(error) if isinstance(error, sync.SyncError) else repr(error)
        self.results.put((who, result, GatherReplacedLayerParams.gathered))
        signal.pause()  # until it is killed, with its group

    def join(self, rank):
        return sync.create_group("127.0.0.1", self.ports[0], rank, 2, torch.device("cpu"), "gloo")

    def train(self, rank):
        deepspeed = ModuleType("deepspeed")
        layers = SimpleNamespace(GatherReplacedLayerParams=GatherReplacedLayerParams)
        deepspeed.module_inject = SimpleNamespace(layers=layers)
        sys.modules["deepspeed"] = deepspeed
        sending.raise_engine_error = lambda _: None
        sending.wait_for_engine_results = lambda references, _: [{} for _ in references]
        store, limit = dist.TCPStore("127.0.0.1", self.ports[1], TRAINERS, rank == 0), timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, timeout=limit, rank=rank, world_size=TRAINERS)
        trainer = trainer_of(rank, self.called)
        if rank == 0:
            trainer._model_update_group = self.join(0)
        elif self.stopped == "trainer 1":
            self.stop_in_the_second_layer()
        return sending.send(trainer, list(trainer.actor.model.module.named_parameters()))

    def stop_in_the_second_layer(self):
        enter = GatherReplacedLayerParams.__enter__

        def stop(one):
            if GatherReplacedLayerParams.gathered == len(SHAPES) * (LAYERS + 1):  # once for its shape
                os.kill(os.getpid(), signal.SIGSTOP)
            enter(one)

        GatherReplacedLayerParams.__enter__ = stop

    def work(self):
        group, held = self.join(1), {}
        content, limit = self.called.get(timeout=30)

        def load(tensors):
            if self.stopped == "worker" and len(held) >= len(SHAPES):
                os.kill(os.getpid(), signal.SIGSTOP)
            held.update((name, tensor.clone()) for name, tensor in tensors)

        receive([group], content, limit, torch.device("cpu"), load, torch.float32)
        expected = whole_weights()
        return sorted(name for name in held if torch.equal(as_bits(held[name]), as_bits(expected[name])))

    @contextmanager
    def answers(self, count):
        for process in self.processes:
            process.start()
        try:
            found = (self.results.get(timeout=60) for _ in range(count))
            yield {who: (result, gathered) for who, result, gathered in found}
        finally:
            for process in self.processes:
                process.kill()
                process.join()


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """A bucket has one parameter; both sides have a deadline of some seconds."""
    monkeypatch.setenv(env_vars.SYNC_BUCKET, "0.007")
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, str(DEADLINE))


@pytest.mark.timeout(120)
def test_whole_weights_are_sent_from_shards_and_both_ranks_gather_each_once_more_for_its_shape():
    with Sync().answers(3) as found:
        assert found["worker"] == (sorted(whole_weights()), 0)
        sent, gathered = found["trainer 0"]
        assert found["trainer 1"] == (0, gathered)
    assert gathered == 2 * LAYERS * len(SHAPES)
    assert sent >= sum(4 * whole.numel() for whole in whole_weights().values()), "and what aligns them"


@pytest.mark.timeout(120)
def test_a_stopped_worker_is_named_and_no_trainer_rank_stays_in_a_gather():
    begun = time.monotonic()
    with Sync("worker").answers(2) as found:
        seconds = time.monotonic() - begun
    error, gathered = found["trainer 0"]
    assert "rank 1 on 127.0.0.1 does not answer: dead, stopped or cut off" in error
    assert found["trainer 1"] == (0, gathered), "both gather to the end"
    assert gathered == 2 * LAYERS * len(SHAPES)
    assert seconds < 60, "the start of the processes, and the deadline"


@pytest.mark.timeout(120)
def test_a_trainer_rank_that_is_stopped_in_a_gather_leaves_no_worker_waiting():
    """A worker knows rank 0 alone, which waits in the gather."""
    begun = time.monotonic()
    with Sync("trainer 1").answers(1) as found:
        seconds = time.monotonic() - begun
    error, _ = found["worker"]
    assert "rank 0 (the trainer) on 127.0.0.1 does not answer" in error
    assert seconds < 60
