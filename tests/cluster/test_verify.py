"""Verification after a sync: a difference ends the run and names parameter, engine, rank and node."""

import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from rlhf_stack.config import env_vars
from rlhf_stack.sync import (
    SyncError,
    SyncMismatch,
    actor_waits,
    digest,
    engine_parameters,
    weight_layout,
)
from rlhf_stack.sync.report import recorded_sync
from rlhf_stack.sync.verify import verify_sync
from rlhf_stack.telemetry import events


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """Make this process a trainer of one rank, with verification on; yields the directory of its events."""
    deepspeed = ModuleType("deepspeed")
    deepspeed.__spec__ = ModuleSpec("deepspeed", None)  # transformers looks for it
    deepspeed.zero = SimpleNamespace(GatheredParameters=lambda *_, **__: nullcontext())
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    monkeypatch.setattr(actor_waits, "wait_for_engine_results", lambda references, _: list(references))
    monkeypatch.setenv(env_vars.EVENTS, str(tmp_path))
    monkeypatch.setenv(env_vars.VERIFY_SYNC, "1")
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield tmp_path
    dist.destroy_process_group()


class Half(torch.nn.Module):
    """A model of one of two ranks; they shard the rows."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.rows = torch.nn.Parameter(torch.zeros(2, 3))

    def load_weights(self, weights):
        for _, value in weights:
            self.rows.data.copy_(value.chunk(2)[self.rank])


def engine(models, stale=()):
    stale = list(stale)

    def pieces(method, wanted):
        assert method == "weight_digests"
        named = [(name, tuple(shape)) for name, shape in wanted]
        found = [digest.digest_model(model, weight_layout.find_layout(model, named)) for model in models]
        return [
            {"digests": [one.as_dict() for one in rank], "rearranged": [], "stale": stale} for rank in found
        ]

    where = [{"rank": rank, "node": f"10.0.0.{rank + 1}"} for rank in range(len(models))]
    return SimpleNamespace(
        call_workers=SimpleNamespace(remote=pieces), where=SimpleNamespace(remote=lambda: where)
    )


def trainer(engines):
    module = torch.nn.Linear(3, 4, bias=False)
    arguments = SimpleNamespace(
        ds=SimpleNamespace(zero_stage=2, tensor_parallel_size=1), vllm=SimpleNamespace(sync_backend="gloo")
    )
    return SimpleNamespace(
        actor=SimpleNamespace(model=SimpleNamespace(module=module)),
        strategy=SimpleNamespace(args=arguments),
        _model_update_group=SimpleNamespace(name="gloo"),
        vllm_engines=engines,
    )


def send(one, models):
    for ranks in models:
        for rank in ranks:
            rank.load_weights([("weight", one.actor.model.module.weight.data)])


def test_equal_weights_are_recorded_as_equal(alone):
    models = [[Half(0), Half(1)], [Half(0), Half(1)]]
    one = trainer([engine(ranks) for ranks in models])
    with recorded_sync(one):
        assert [event["name"] for event in events.read(alone)] == ["sync"], "recorded before it may stall"
        send(one, models)
    (recorded,) = [event for event in events.read(alone) if event["event"] == "verify"]
    assert recorded["equal"] is True
    assert recorded["mismatched"] == []
    (synced,) = [event for event in events.read(alone) if event["event"] == "sync"]
    assert (synced["bytes"], synced["backend"]) == (48, "gloo")


def test_a_difference_names_parameter_engine_rank_and_node(alone):
    models = [[Half(0), Half(1)], [Half(0), Half(1)]]
    one = trainer([engine(ranks) for ranks in models])
    one.engine_indices = [0, 2]  # engine 1 is lost
    send(one, models)
    models[1][1].rows.data[0, 0] += 1
    with pytest.raises(SyncMismatch) as raised, recorded_sync(one):
        pass
    assert "1 of 1 parameters differ" in str(raised.value)
    assert "weight: engine 2, rank 1 on 10.0.0.2" in str(raised.value)
    (recorded,) = [event for event in events.read(alone) if event["event"] == "verify"]
    assert recorded["equal"] is False
    assert recorded["mismatched"] == ["weight"]


def test_a_parameter_that_was_not_written_is_named_also_if_it_is_equal(alone):
    models = [[Half(0), Half(1)], [Half(0), Half(1)]]
    one = trainer([engine(models[0]), engine(models[1], ["experts"])])
    send(one, models)
    with pytest.raises(SyncMismatch) as raised, recorded_sync(one):
        pass
    assert "experts: engine 1, rank 0 on 10.0.0.1: this sync did not write it" in str(raised.value)


def test_an_engine_that_does_not_answer_leaves_no_rank_gathering(alone, monkeypatch):
    """The other ranks gather every parameter, and so does the root rank before it raises."""
    gathered = []
    deepspeed = sys.modules["deepspeed"]
    deepspeed.zero.GatheredParameters = lambda *_, **__: nullcontext(gathered.append(1))

    def lost(*_):
        raise SyncError("engine 0 is lost")

    monkeypatch.setattr(actor_waits, "wait_for_engine_results", lost)
    with pytest.raises(SyncError, match="engine 0 is lost"):
        verify_sync(trainer([engine([Half(0), Half(1)])]), 0, is_root=True)
    assert gathered == [1]


def test_every_rank_takes_part_in_the_description_of_parameters(alone, monkeypatch):
    """The first one gathers a parameter that tensor parallelism shards."""
    described = []
    monkeypatch.setenv(env_vars.VERIFY_SYNC, "0")
    monkeypatch.setattr(engine_parameters.EngineParameter, "spec", lambda one, _: described.append(one.name))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with recorded_sync(trainer([])):
        pass
    assert described == ["weight"]
