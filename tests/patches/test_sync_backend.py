PROBE = """
import inspect
import multiprocessing
import socket

import torch
import vllm.distributed.device_communicators.pynccl  # imported once, before the fork

helpers = load("openrlhf/utils/distributed_util.py", "helpers")
WORLD = 3


def join(rank, port, results):
    create = helpers.stateless_init_process_group
    backend = {"backend": "gloo"} if "backend" in inspect.signature(create).parameters else {}
    group = create("127.0.0.1", port, rank, WORLD, torch.device("cpu"), **backend)
    sent = torch.arange(15, dtype=torch.bfloat16).reshape(3, 5)
    tensor = sent.clone() if rank == 0 else torch.full_like(sent, float("nan"))
    group.broadcast(tensor, src=0, stream=None)
    results.put((rank, torch.equal(tensor, sent)))


with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
fork = multiprocessing.get_context("fork")
results = fork.Queue()
ranks = [fork.Process(target=join, args=(rank, port, results), daemon=True) for rank in range(WORLD)]
for rank in ranks:
    rank.start()
equal = dict(results.get(timeout=60) for _ in ranks)
for rank in ranks:
    rank.join(60)
assert all(equal.values()), f"rank 0 sent with --vllm.sync_backend gloo; received: {equal}"
print("every rank received what rank 0 sent over gloo")
"""


def test_gloo_means_gloo_and_weights_arrive(proves):
    """Upstream takes NCCL whatever the flag says, and without NCCL its broadcast does nothing, unnoticed."""
    proves(PROBE, r"received: \{.*False|NCCL|CUDA|_queue.Empty")
