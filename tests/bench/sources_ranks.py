"""The part of `tests.bench.sources` inside an image: a trainer rank that sends, or two engine workers."""

import argparse
import json
import multiprocessing
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from rlhf_stack import sync
from rlhf_stack.config import env_vars
from rlhf_stack.sync import encoding
from rlhf_stack.sync.buckets import Share, plan_buckets
from rlhf_stack.sync.engine_parameters import parameter_spec
from rlhf_stack.sync.receiving import receive
from rlhf_stack.sync.sending import new_sender

WORKERS, PORT = 2, 29600
LIMIT = env_vars.sync_bucket()
CPU, DTYPE = torch.device("cpu"), torch.bfloat16
TENSORS, SHAPE = 60, (1000, 1000)


def new_weights() -> list[tuple[str, torch.Tensor]]:
    """Return weights of 120 MB."""
    return [(f"w{index}", torch.ones(SHAPE, dtype=DTYPE)) for index in range(TENSORS)]


def group(host: str, rank: int) -> Any:
    """Join the sync group of the trainer rank at ``host``."""
    return sync.create_group(host, PORT, rank, 1 + WORKERS, CPU, "gloo")


def send(own: Any, weights: Sequence[tuple[str, Any]], share: Share) -> None:
    """Send a share of the weights."""
    buckets = plan_buckets([parameter_spec(*each) for each in weights], LIMIT // share.count)
    with own.syncing():
        sender = new_sender(own, encoding.FULL, buckets[share.index :: share.count], in_place=True)
        for number, bucket in enumerate(buckets):
            if share.has(number):
                tensors = [weights[span.index][1] for span in bucket.spans]
                sender.send(number // share.count, bucket, tensors)
        sender.finish()


def follow(hosts: Sequence[str], rank: int, counts: Sequence[int], repeat: int, found: Any) -> None:
    """Run an engine worker; put the median seconds for each number of sources."""
    groups = [group(host, rank) for host in hosts]
    weights = new_weights()
    held, content = dict(weights), [astuple(parameter_spec(*each)) for each in weights]

    def load(views: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, view in views:
            held[name].copy_(view)

    medians = []
    for count in counts:
        times = []
        for _ in range(repeat + 1):
            start = time.perf_counter()
            receive(groups[:count], content, LIMIT // count, CPU, load, DTYPE)
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times[1:]))
    found.put((medians, sum(tensor.numel() * tensor.element_size() for tensor in held.values())))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sources", nargs="+", required=True, help="addresses of the trainer ranks")
    parser.add_argument("--rank", type=int, help="the trainer rank to run; without it the workers run")
    parser.add_argument("--counts", type=int, nargs="+", required=True)
    parser.add_argument("--repeat", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank is not None:
        own = group(options.sources[options.rank], 0)
        weights = new_weights()
        for count in options.counts:
            for _ in range((options.repeat + 1) * (options.rank < count)):
                send(own, weights, Share(options.rank, count))
        signal.pause()  # workers still use its store; the host removes the container
    found: Any = multiprocessing.Queue()
    ends = [
        multiprocessing.Process(
            target=follow, args=(options.sources, rank, options.counts, options.repeat, found)
        )
        for rank in range(1, WORKERS + 1)
    ]
    for end in ends:
        end.start()
    seconds, size = max(found.get() for _ in ends)
    for end in ends:
        end.join()
    print(json.dumps({"seconds": seconds, "bytes": size}))


if __name__ == "__main__":
    main()
