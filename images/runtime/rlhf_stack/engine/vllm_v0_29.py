"""The sync group as an engine of vLLM 0.29's weight-transfer interface, so that vLLM loads the weights.

vLLM rearranges the weights of some layers after it has loaded them: fused experts, quantized layers, and the
projections of MLA. Its layer-wise reload restores the tensors of a layer as they were before, loads and
processes them again, and copies the result into the memory that the engine uses.

The interface differs between releases of vLLM: `tests/cluster/test_weight_transfer.py` is its contract.
"""

import logging
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise, meta

from rlhf_stack.accelerator import devices
from rlhf_stack.config import env_vars
from rlhf_stack.engine.layerwise_reload import LayerwiseReload
from rlhf_stack.engine.startup import TRANSFER_BACKEND
from rlhf_stack.lazy import torch
from rlhf_stack.sync import SyncError, create_group, same_gpu
from rlhf_stack.sync.engine_parameters import require_head
from rlhf_stack.sync.group import WeightGroup
from rlhf_stack.sync.nccl import StreamGroup
from rlhf_stack.sync.reads import Reads
from rlhf_stack.sync.receiving import receive

if TYPE_CHECKING:
    Engine = Any
else:
    Engine = WeightTransferEngine

IN_CHECKPOINT_LAYOUT = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


@dataclass
class JoinInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The sync group that an engine's workers join: its ranks from ``rank_offset`` on, or ``offers``.

    ``offers`` are for workers on the trainer's GPUs, see `sync.same_gpu`.
    """

    host: str = ""
    port: int = 0
    rank_offset: int = 0
    world: int = 0
    backend: str = ""
    offers: dict[str, str] | None = None


@dataclass
class SyncInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What `sync.sending` sends: each parameter's fields, the size of a bucket, and the encoding.

    ``held`` are other dtypes than the engine's, see `sync.receiving`.
    """

    parameters: Sequence[Any]
    limit: int
    encoding: str
    held: dict[str, str]


class SyncGroupEngine(Engine):  # type: ignore[misc]
    """Receives the trainer's weights over a sync group, in one worker."""

    init_info_cls = JoinInfo
    update_info_cls = SyncInfo
    supports_draft_weight_update = False

    groups: Sequence[WeightGroup] = ()  # of the trainer ranks that send
    reads: Reads | None = None  # of the workers of a sharded engine
    reload: LayerwiseReload
    report: dict[str, Any]  # of the last sync
    unsent: frozenset[str] | None = None  # names of the engine's parameters that the last sync did not write
    sent_before: frozenset[str] = frozenset()  # those that an earlier sync wrote

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Join the sync group, after leaving the one that this worker was in."""
        self.shutdown()
        if init_info.offers is not None:
            who = f"engine worker of rank {torch.distributed.get_rank()} on {socket.gethostname()}"
            self.groups = [same_gpu.join(init_info.offers, devices.physical_gpu_id(), who)]
            return
        rank = torch.distributed.get_rank() + init_info.rank_offset
        where = init_info.host, init_info.port, rank, init_info.world
        self.groups = [create_group(*where, self.device, init_info.backend)]

    def join_sources(self, endpoints: Sequence[tuple[str, int]], rank_offset: int, world: int) -> None:
        """Join the sync groups of further trainer ranks, which listen at ``endpoints``."""
        rank = torch.distributed.get_rank() + rank_offset
        for host, port in endpoints:
            group = create_group(host, port, rank, world, self.device, "gloo")
            self.groups = [*self.groups, group]

    def start_weight_update(self) -> None:
        """Restore the tensors of each layer as they were before vLLM processed them."""
        self.reload = LayerwiseReload(self.model, rearranged_tensors(self.model))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive all weights; vLLM's own method synchronizes an accelerator, which a CPU has none of."""
        self.receive_weights(self.parse_update_info(update_info))
        devices.synchronize()

    def receive_weights(self, update_info: SyncInfo) -> None:
        """Receive and load all weights; ``report`` is the worker's report of it."""
        if not self.groups:
            raise SyncError("weight sync: this worker has joined no sync group")
        if self.reads is None and self._is_sharded():
            self.reads = Reads()
        self.report = receive(
            self.groups,
            update_info.parameters,
            update_info.limit,
            devices.torch_device(),
            self.reload.load,
            self.model_config.dtype,
            update_info.encoding,
            load_keeps=True,  # a layer is loaded when it is complete
            reads=self.reads,
            held=update_info.held,
        )

    def _is_sharded(self) -> bool:
        """Report whether this worker's loader reads a part of each parameter, the same in every sync.

        Models with layers that vLLM rearranges (fused experts) were not verified. Nor was a GPU, where
        copying all weights is quick next to recording what is read.
        """
        setting = env_vars.sync_sharded()
        is_on = setting == "on" or (setting == "auto" and not devices.is_gpu())
        is_same = not (self.vllm_config.parallel_config.enable_eplb or rearranged_tensors(self.model))
        return is_on and is_same and torch.distributed.get_world_size() > 1

    def finish_weight_update(self) -> None:
        """Process the layers that are left; what received nothing keeps its weights."""
        with nullcontext() if self.reads is None else self.reads.recorded():
            written = self.reload.finish(self.model_config)
        if self.reads is not None:
            self.reads.ended()
        sent, unsent = by_written(self.model, written)
        require_head(sent, unsent - self.sent_before)
        if unsent != self.unsent:
            self.report["unsent"] = sorted(unsent)
        self.unsent, self.sent_before = unsent, self.sent_before | sent
        devices.empty_cache()

    def abort_weight_update(self) -> None:
        """End an update that failed: layers that are not complete keep the weights from before it."""
        self.reads = None  # what the loader has read of a sync that failed is unknown
        self.reload.abort(self.model_config)
        for group in self.groups:
            if isinstance(group, StreamGroup):
                group.close()  # `empty_cache` would wait for its broadcasts; the next sync has a new group
        devices.empty_cache()

    def shutdown(self) -> None:
        """Leave the sync groups."""
        groups, self.groups = self.groups, ()
        for group in groups:
            group.close()


class Once(logging.Filter):
    """Passes each message once: vLLM logs every layer that received nothing, such as RotaryEmbedding."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the message is new."""
        message = record.getMessage()
        is_new = message not in self._seen
        self._seen.add(message)
        return is_new


def rearranged_tensors(model: Any) -> set[str]:
    """Return the names of tensors of layers whose weights vLLM may rearrange after it has loaded them."""
    return {
        f"{prefix}.{name}"
        for prefix, layer in model.named_modules()
        if isinstance(method := getattr(layer, "quant_method", None), QuantizeMethodBase)
        and not isinstance(method, IN_CHECKPOINT_LAYOUT)
        for name, _ in (*layer.named_parameters(), *layer.named_buffers())
    }


def by_written(model: Any, written: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of parameters that were written, and of the others; tied ones have several names.

    Those that vLLM computes from others after loading, such as MLA's, are in neither.
    """
    named = model.named_parameters(remove_duplicate=False)
    found = {id(parameter) for name, parameter in named if name in written}
    computed = set(_computed(model))
    names = {name: id(each) in found for name, each in model.named_parameters() if name not in computed}
    sent = frozenset(name for name, is_written in names.items() if is_written)
    return sent, frozenset(names.keys() - sent)


def _computed(model: Any) -> Iterator[str]:
    """Yield the names of parameters that a layer did not have when its weights were loaded."""
    for prefix, layer in model.named_modules():
        loaded, _ = layerwise.get_layerwise_info(layer).restore_metadata
        for name, _ in layer.named_parameters(recurse=False):
            if name not in loaded and name not in meta.SKIP_TENSORS:  # vLLM leaves these out of its record
                yield f"{prefix}.{name}".removeprefix(".")


logging.getLogger(layerwise.__name__).addFilter(Once())
WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, SyncGroupEngine)
