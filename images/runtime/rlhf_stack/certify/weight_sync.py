"""The rungs ``sync`` and ``lost-rank``: weight syncs between a trainer and the ranks of engines."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from importlib import import_module
from typing import Any

from rlhf_stack import sync
from rlhf_stack.accelerator import devices
from rlhf_stack.certify.device_memory import BUCKET, SMALL_BUCKET, parameters
from rlhf_stack.certify.ladder import Found, NotClimbedError, Place
from rlhf_stack.certify.model import Measurement
from rlhf_stack.certify.on_cluster import LATE, actors, answers, free_endpoint, gpus_of, nodes_with_gpus
from rlhf_stack.cluster import assigned_gpu
from rlhf_stack.config import env_vars
from rlhf_stack.lazy import ray, torch
from rlhf_stack.sync.buckets import plan_buckets
from rlhf_stack.sync.digest import checksum
from rlhf_stack.sync.engine_parameters import parameter_spec
from rlhf_stack.sync.receiving import receive
from rlhf_stack.sync.sending import BucketSender

JOIN_SECONDS, SYNC_SECONDS = 120.0, 120.0
LOST_TIMEOUT = 12.0  # the deadline of the sync in which a rank is killed
SLACK = 20.0  # beyond it: the diagnosis, and a busy machine
SYNCS = 3  # of which the best counts
AUTO = "auto"


class Rank:
    """The trainer, rank 0, or an engine worker."""

    def prepare(self, is_trainer: bool, backend: str, small: bool) -> None:
        """Import libraries and make the parameters, which may take longer than ranks wait for each other."""
        if is_trainer:
            assigned_gpu.select()
        else:
            assigned_gpu.restrict()
        if backend != "gloo" and devices.is_gpu():
            for module in ("vllm.distributed", "openrlhf.utils.distributed_util"):
                import_module(module)
        self._limit = SMALL_BUCKET if small else BUCKET
        made = parameters(small)
        self._expected = {name: checksum(tensor) for name, tensor in made.items()}
        device = devices.torch_device()
        self._held = {
            name: tensor.to(device) if is_trainer else tensor.new_zeros(tensor.shape).to(device)
            for name, tensor in made.items()
        }
        self._specs = [parameter_spec(name, tensor) for name, tensor in self._held.items()]

    def join(self, host: str, port: int, rank: int, world: int, backend: str, timeout: float) -> str:
        """Join the group; return this rank's name in errors."""
        os.environ[env_vars.SYNC_TIMEOUT] = str(timeout)
        self._group = sync.create_group(host, port, rank, world, devices.current_device(), backend)
        return self._group.describe(rank)

    def selection(self) -> tuple[str, str]:
        """The backend of the group, and why `auto` selected it."""
        return self._group.name, self._group.selection

    def sync(self) -> tuple[float, int, list[str]]:
        """Send or receive all parameters once; the seconds, the bytes, and which parameters differ."""
        start = time.monotonic()
        if self._group.rank:
            specs = [astuple(spec) for spec in self._specs]
            device = devices.torch_device()
            receive([self._group], specs, self._limit, device, self._load, torch.bfloat16)
        else:
            with self._group.syncing():
                self._send()
        devices.synchronize()
        seconds = time.monotonic() - start
        different = [name for name, tensor in self._held.items() if checksum(tensor) != self._expected[name]]
        return seconds, sum(spec.size for spec in self._specs), different

    def _send(self) -> None:
        sender, tensors = BucketSender(self._group, in_place=True), list(self._held.values())
        for number, bucket in enumerate(plan_buckets(self._specs, self._limit)):
            sender.send(number, bucket, [tensors[span.index] for span in bucket.spans])
        sender.finish()

    def _load(self, pairs: "list[tuple[str, torch.Tensor]]") -> None:
        for name, tensor in pairs:
            self._held[name].copy_(tensor)

    def die(self) -> None:
        """End this process as a crash does."""
        os.kill(os.getpid(), signal.SIGKILL)


def climb(place: Place) -> Found:
    """Sync a few times over each backend between all GPUs, and compare every parameter on every rank.

    Last over the one that `auto` selects, which must be the fastest that the image has.
    """
    measurements: list[Measurement] = []
    details: dict[str, Any] = {}
    problems = []
    for backend in (*backends(), AUTO):
        with _joined(place, backend, SYNC_SECONDS) as (ranks, names):
            selected = answers([rank.selection.remote() for rank in ranks], names, JOIN_SECONDS)
            runs = [
                answers([rank.sync.remote() for rank in ranks], names, SYNC_SECONDS) for _ in range(SYNCS)
            ]
        best = min(max(seconds for seconds, _, _ in run) for run in runs)
        size = runs[0][0][1]
        measurements.append(Measurement(f"{backend}, {len(ranks)} ranks", size / best / 1e9, "GB/s"))
        details[backend] = {
            "ranks": names,
            "bytes": size,
            "seconds": [[one[0] for one in run] for run in runs],
        }
        if backend == AUTO:
            details[backend] |= {"selected": selected[0][0], "why": selected[0][1]}
            problems += wrong_selection(selected, names)
        problems += [
            f"{backend}, {name}: other bytes in {', '.join(different)}"
            for run in runs
            for name, (_, _, different) in zip(names, run, strict=True)
            if different
        ]
    return Found(measurements, details, "; ".join(problems))


def wrong_selection(selected: Sequence[tuple[str, str]], names: Sequence[str]) -> list[str]:
    """What is wrong with the backends that `auto` selected on the ranks; all of the image have worked."""
    if len({name for name, _ in selected}) > 1:
        ranks = (f"{name} on {rank}" for rank, (name, _) in zip(names, selected, strict=True))
        return [f"auto selects {', '.join(ranks)}"]
    name, why = selected[0]
    return [f"auto selects {name}, and {best} works: {why}" for best in backends()[:1] if name != best]


def lost_rank(place: Place) -> Found:
    """Kill the last rank after a sync; the error of one that remains must name it in time in the next one.

    It may be that of any rank: the trainer has sent all when the loss has not reached it yet.
    """
    measurements, problems, details = [], [], {}
    for backend in backends():
        with _joined(place, backend, LOST_TIMEOUT) as (ranks, names):
            answers([rank.sync.remote() for rank in ranks], names, SYNC_SECONDS)
            ranks[-1].die.remote()
            start = time.monotonic()
            try:
                syncing = [rank.sync.remote() for rank in ranks[:-1]]
                answers(syncing, names[:-1], LOST_TIMEOUT + SLACK)
                error = "the sync ended as if nothing had happened"
            except RuntimeError as raised:
                error = str(raised)
            seconds = time.monotonic() - start
        measurements.append(Measurement(f"{backend}: seconds until the error", seconds, "s"))
        details[backend] = {"killed": names[-1], "error": error}
        if f"{names[-1]} does not answer" not in error or LATE in error:
            problems.append(f"{backend}: the error does not name {names[-1]} in time: {error}")
    return Found(measurements, details, "; ".join(problems))


def backends() -> tuple[str, ...]:
    """The backends of this image."""
    return ("nccl", "gloo") if devices.is_gpu() else ("gloo",)


@contextmanager
def _joined(place: Place, backend: str, timeout: float) -> Iterator[tuple[Sequence[Any], list[str]]]:
    """Yield a rank on each GPU, joined to one group with this ``timeout`` for a transfer, and their names."""
    with nodes_with_gpus(place) as nodes:
        addresses = gpus_of(nodes)
        if len(addresses) < 2:
            raise NotClimbedError("one GPU: there is no engine on another one")
        with actors(Rank, addresses) as ranks:
            numbers = [f"rank {index} on {address}" for index, address in enumerate(addresses)]
            preparing = [rank.prepare.remote(rank is ranks[0], backend, place.small) for rank in ranks]
            answers(preparing, numbers, JOIN_SECONDS)
            _, port = ray.get(ranks[0].__ray_call__.remote(free_endpoint), timeout=JOIN_SECONDS)
            joining = [
                rank.join.remote(addresses[0], port, index, len(ranks), backend, timeout)
                for index, rank in enumerate(ranks)
            ]
            yield ranks, answers(joining, numbers, JOIN_SECONDS)
