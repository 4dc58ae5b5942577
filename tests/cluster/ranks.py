"""A process for each rank of a sync group, and the two sides of a sync between them."""

import multiprocessing
import os
import signal
from dataclasses import astuple
from math import prod

import torch
from ports import free_port
from rlhf_stack import sync
from rlhf_stack.sync import membership
from rlhf_stack.sync.buckets import plan_buckets
from rlhf_stack.sync.encoding import FULL
from rlhf_stack.sync.engine_parameters import parameter_spec
from rlhf_stack.sync.receiving import receive
from rlhf_stack.sync.sending import new_sender

ONE_NODE, TWO_NODES, FOUR_NODES = "1111", "1122", "1234"  # the last part of each rank's address
WORLD = 4
LIMIT = 3 << 20
DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
SHAPES = [(7, 5), (0,), (), (3,), (1 << 20,), (900, 1000), (1,), (5, 0, 2), ((4 << 20) + 5,)]
NAMES = ["w", "w.w", "w.weight", "w.weight_scale", "w1", "w10", "w1.w"]
FORK = multiprocessing.get_context("fork")
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork


class Ranks:
    """A process per rank, which reports what ``target`` returns or raises."""

    def __init__(self, target, nodes=ONE_NODE):
        self.results = FORK.Queue()
        port = free_port()

        def run(rank):
            membership._own_address = lambda *_: f"127.0.0.{nodes[rank]}"
            try:
                group = sync.create_group("127.0.0.1", port, rank, WORLD, torch.device("cpu"), "gloo")
                self.results.put((rank, target(rank, group)))
            except Exception as error:
                self.results.put((rank, error))
            signal.pause()  # until it is killed, with its group

        self.processes = [FORK.Process(target=run, args=(rank,), daemon=True) for rank in range(WORLD)]

    def __enter__(self):
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()

    def answers(self, count=WORLD, seconds=60):
        return dict(self.results.get(timeout=seconds) for _ in range(count))


def described(rank, nodes=ONE_NODE):
    return f"rank {rank}{'' if rank else ' (the trainer)'} on 127.0.0.{nodes[rank]}"


def nothing(_):
    """Do nothing with a bucket."""


def send(group, parameters, encoding=FULL, in_place=True, before=nothing):
    """Send as the trainer does; return the bytes on a link."""
    specs = [parameter_spec(name, tensor) for name, tensor in parameters]
    with group.syncing():
        buckets = plan_buckets(specs, LIMIT)
        sender = new_sender(group, encoding, buckets, in_place)
        for number, bucket in enumerate(buckets):
            before(number)
            sender.send(number, bucket, [parameters[span.index][1] for span in bucket.spans])
        sender.finish()
    return sender.sent


def receive_all(group, parameters, encoding=FULL, load=nothing):
    """Receive as an engine worker does; only the specs of ``parameters`` are used."""
    content = [astuple(parameter_spec(name, tensor)) for name, tensor in parameters]
    return receive([group], content, LIMIT, torch.device("cpu"), load, parameters[0][1].dtype, encoding)


def arrive(group, parameters, encoding=FULL):
    """Receive; report whether exactly the bits of ``parameters`` arrived, in their shapes."""
    held = {}
    receive_all(
        group, parameters, encoding, lambda views: held.update((n, view.clone()) for n, view in views)
    )
    return are_equal(held, parameters)


def are_equal(held, parameters):
    """Report whether tensors by name are exactly ``parameters``."""
    return len(held) == len(parameters) and all(
        torch.equal(as_bits(held[name]), as_bits(tensor)) and held[name].shape == tensor.shape
        for name, tensor in parameters
    )


def errors_without(victim, how, nodes, count, encodings=(FULL,), take=receive_all):
    """The error of each other rank when ``victim`` gets the signal ``how`` in the middle of the last sync.

    Each sync has ``count`` buckets of one parameter, which workers receive by ``take``.
    """
    parameters = [(f"w{index}", torch.ones(2 << 20, dtype=torch.uint8)) for index in range(count)]

    def exchange(rank, group):
        for number, encoding in enumerate(encodings, 1):
            last = count // 2 if rank == victim and number == len(encodings) else None

            def reach(number, last=last):
                if number == last:
                    os.kill(os.getpid(), how)

            if rank == 0:
                send(group, parameters, encoding, before=reach)
            else:
                take(group, parameters, encoding, lambda views, act=reach: act(int(views[0][0][1:])))

    with Ranks(exchange, nodes) as ranks:
        found = ranks.answers(WORLD - 1)
    assert set(found) == set(range(WORLD)) - {victim}, found
    for rank, error in found.items():
        assert isinstance(error, sync.SyncError)
        assert str(error).startswith(f"weight sync, {described(rank, nodes)}, gloo, ")
        assert f"{described(victim, nodes)} does not answer" in str(error), found
    return [str(error) for error in found.values()]


def random_bytes(dtype, shape, generator):
    """A tensor of any bit patterns, among them NaN and subnormal numbers; a bool has two."""
    size, patterns = prod(shape) * dtype.itemsize, 2 if dtype == torch.bool else 256
    content = torch.randint(0, patterns, (size,), dtype=torch.uint8, generator=generator)
    return content.view(dtype).reshape(shape)


def weights(dtype, seed=0):
    """Named tensors; some names are prefixes of others.

    Empty, one element, small, larger than `LARGE`, larger than a bucket; then parts of others: transposed,
    with an offset, with steps, wide rows, repeated, permuted.
    """
    generator = torch.Generator().manual_seed(seed)

    def of(*shape):
        return random_bytes(dtype, shape, generator)

    tensors = [
        *(of(*shape) for shape in SHAPES),
        of(3, 1000).t(),
        of(2000)[3:1502],
        of(40, 50)[1::3, 2:49:2],
        of(1200, 1300)[100:, 7:1299],
        of(3, 1).expand(3, 4),
        of(4, 5, 6).permute(2, 0, 1),
    ]
    names = [*NAMES, *(f"w{index}.bias" for index in range(len(NAMES), len(tensors)))]
    return list(zip(names, tensors, strict=True))


def flip_last_bits(parameters):
    """Flip the last bit of the last element of each parameter, in place."""
    for _, tensor in parameters:
        if tensor.numel():
            tensor[(-1,) * tensor.dim()].reshape(1).view(torch.uint8)[0] ^= 1


def as_bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)
