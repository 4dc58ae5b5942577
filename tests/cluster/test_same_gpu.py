"""A trainer rank passes random weights to the engine worker on its GPU; either side may fail or end."""

import os
import signal
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from ranks import DTYPES, FORK, LIMIT, are_equal, arrive, flip_last_bits, receive_all, send, weights
from rlhf_stack.config import env_vars
from rlhf_stack.sync import SyncError, same_gpu
from rlhf_stack.sync.engine_parameters import parameter_spec
from rlhf_stack.sync.receiving import receive

GPU = "node:0"
TRAINER, WORKER = "trainer rank 3 on one", "rank 1 of engine 2 on two"
FILES = Path("/proc/self/fd")
WEIGHTS = weights(torch.bfloat16)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setenv(env_vars.SYNC_BUCKET, str(LIMIT / 10**6))


def load(group, named):
    """Receive, and keep what was received for as long as the real loader may."""
    content, held = [astuple(parameter_spec(*each)) for each in named], {}
    report = receive([group], content, LIMIT, group.device, held.update, torch.bfloat16, load_keeps=True)
    return held, report


class Worker:
    """A process that joins the trainer's group and then runs ``action(group)``."""

    def __init__(self, action):
        self.offer, self.results = same_gpu.Offer(GPU, TRAINER), FORK.Queue()

        def run():
            try:
                self.results.put(action(same_gpu.join({GPU: self.offer.address}, GPU, WORKER)))
            except SyncError as error:
                self.results.put(str(error))

        self.process = FORK.Process(target=run, daemon=True)

    def __enter__(self):
        self.process.start()
        self.group = self.offer.accept()
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.join()
        self.group.close()


@pytest.mark.timeout(150)
def test_every_dtype_and_shape_arrives_bit_for_bit_sync_after_sync():
    def each_sync():
        for number, dtype in enumerate(DTYPES):
            parameters = weights(dtype, seed=number)
            yield parameters
            flip_last_bits(parameters)
            yield parameters

    with Worker(lambda group: [arrive(group, each) for each in each_sync()]) as worker:
        for each in each_sync():
            send(worker.group, each)
        assert worker.results.get(timeout=100) == [True] * 2 * len(DTYPES)


@pytest.mark.timeout(60)
def test_the_worker_holds_every_byte_in_each_sync():
    each_sync = [weights(torch.bfloat16, seed) for seed in range(3)]

    def action(group):
        found = []
        for parameters in each_sync:
            held, report = load(group, parameters)
            found.append((are_equal(held, parameters), report["who"]))
        return found

    files = len(list(FILES.iterdir()))
    with Worker(action) as worker:
        for parameters in each_sync:
            send(worker.group, parameters)
        assert worker.results.get(timeout=30) == [(True, f"engine worker on GPU {GPU}")] * 3
    assert len(list(FILES.iterdir())) <= files + 4, "the queue's files, and none of the memory"


@pytest.mark.timeout(60)
def test_a_failure_of_the_loader_ends_the_trainers_sync_at_once():
    def action(group):
        receive_all(group, WEIGHTS, load=lambda _: 1 // 0)

    with (
        Worker(action) as worker,
        pytest.raises(SyncError, match=r"worker on GPU node:0 failed: ZeroDivisionError"),
    ):
        send(worker.group, WEIGHTS)


@pytest.mark.timeout(60)
def test_a_failure_of_the_trainer_ends_the_workers_sync_at_once():
    def fail(group):
        with group.syncing():
            raise RuntimeError("out of memory")

    with Worker(lambda group: load(group, WEIGHTS)) as worker:
        with pytest.raises(RuntimeError, match="out of memory"):
            fail(worker.group)
        assert "trainer rank on GPU node:0 failed: RuntimeError: out of memory" in worker.results.get(
            timeout=30
        )


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("signal_sent", "reason"),
    [
        (signal.SIGKILL, "does not answer: "),
        (signal.SIGSTOP, r"waited 2 s for the engine worker on GPU node:0 to load"),
    ],
)
def test_a_worker_that_ends_or_stops_is_named_within_the_deadline(monkeypatch, signal_sent, reason):
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "2")
    with Worker(lambda _: signal.pause()) as worker:
        os.kill(worker.process.pid, signal_sent)
        with pytest.raises(SyncError, match=reason):
            send(worker.group, WEIGHTS)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("packed", [0, 3])  # buckets before it: none, and more than slots
@pytest.mark.parametrize(
    ("signal_sent", "reason"),
    [
        (signal.SIGKILL, "the trainer rank on GPU node:0 does not answer: "),
        (signal.SIGSTOP, r"waited 4 s for the trainer rank on GPU node:0 to (offer memory|pack bucket 4 of)"),
    ],
)
def test_a_trainer_that_ends_or_stops_is_named_within_the_deadline(monkeypatch, signal_sent, reason, packed):
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "4")
    offer = same_gpu.Offer(GPU, TRAINER)

    def reach(number):
        if number == packed:
            os.kill(os.getpid(), signal_sent)

    trainer = FORK.Process(target=lambda: send(offer.accept(), WEIGHTS, before=reach), daemon=True)
    trainer.start()
    offer.withdraw()
    try:
        group = same_gpu.join({GPU: offer.address}, GPU, WORKER)
        with pytest.raises(SyncError, match=reason):
            receive_all(group, WEIGHTS)
        group.close()
    finally:
        trainer.kill()
        trainer.join()


def test_a_worker_that_does_not_join_is_named_within_the_deadline(monkeypatch):
    monkeypatch.setenv(env_vars.SYNC_TIMEOUT, "0.2")
    with pytest.raises(
        SyncError,
        match=r"trainer rank 3 on one: no engine worker on GPU node:0 joined within 0\.2 s .*one container",
    ):
        same_gpu.Offer(GPU, TRAINER).accept()


def test_the_error_of_an_engine_ends_the_wait_for_its_worker_at_once():
    def watch():
        raise SyncError("the worker has failed")

    with pytest.raises(SyncError, match="the worker has failed"):
        same_gpu.Offer(GPU, TRAINER).accept(watch)


def test_a_trainer_rank_that_is_not_reachable_is_named():
    with pytest.raises(
        SyncError, match=r"rank 1 of engine 2 on two: the trainer rank on GPU node:0 is not re"
    ):
        same_gpu.join({GPU: "\0unused"}, GPU, WORKER)


def test_a_worker_on_another_gpu_is_refused():
    with pytest.raises(SyncError, match=r"no trainer rank is on GPU node:1 of rank 1 of engine 2 on two"):
        same_gpu.join({GPU: "\0unused"}, "node:1", WORKER)


@pytest.mark.timeout(60)
def test_a_gpus_memory_travels_as_a_handle(monkeypatch):
    """The handles are replaced by the shared memory of torch: this machine has no GPU."""
    opened = []

    def rebuild(*shared):
        storage = torch.UntypedStorage._new_shared_filename_cpu(*shared)
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def open_handle(handle, index):
        opened.append(index)
        return rebuild(*handle[1])

    reductions = torch.multiprocessing.reductions
    monkeypatch.setattr(
        reductions, "reduce_tensor", lambda each: (None, each.untyped_storage()._share_filename_cpu_())
    )

    monkeypatch.setattr(same_gpu.devices, "open_handle", open_handle)
    monkeypatch.setattr(same_gpu.devices, "is_gpu", lambda: True)
    for name in ("torch_device", "synchronize", "empty_cache"):
        found = torch.device("cpu") if name == "torch_device" else None
        monkeypatch.setattr(same_gpu.devices, name, lambda found=found: found)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)

    def action(group):
        held, _ = load(group, WEIGHTS)
        return len(opened), are_equal(held, WEIGHTS)

    with Worker(action) as worker:
        send(worker.group, WEIGHTS)
        assert worker.results.get(timeout=30) == (2, True), "a handle for each slot"
