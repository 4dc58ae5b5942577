"""Estimates the model states that DeepSpeed holds on one rank: weights, gradients, optimiser and buffers.

All results are bytes, for DeepSpeed with 16-bit weights and Adam as OpenRLHF configures it: its "auto" values
become DeepSpeed's defaults. ``tests/image/test_memory.py`` compares them with a DeepSpeed engine.
"""

from dataclasses import dataclass

BYTES_16BIT, BYTES_32BIT = 2, 4  # bytes of a 16-bit and of a 32-bit number
MOMENTS = 2  # of Adam, per parameter
BUCKET = 500_000_000  # elements: DeepSpeed's reduce_bucket_size
LIVE = 1_000_000_000  # elements: its stage3_max_live_parameters
SUBGROUP = 1_000_000_000  # elements: its sub_group_size, the unit of a ZeRO-3 optimiser step


@dataclass(frozen=True)
class Zero:
    """The ZeRO configuration of a model over ``ranks`` data-parallel ranks.

    ``offload``: the optimiser is on the host; ``offload_weights``: so are the weights of an untrained model.
    ``fp32_gradients``: gradients are accumulated in 32 bits. ``shards``: size of the group that holds the
    secondary copy of the weights in ZeRO++ hpZ, 1 without it.
    """

    stage: int
    ranks: int
    offload: bool = False
    offload_weights: bool = False
    fp32_gradients: bool = False
    overlap: bool = False
    shards: int = 1


@dataclass(frozen=True)
class ModelStates:
    """The model states of one rank: bytes on the GPU, and on the ``host``.

    ``buffers`` exist during a pass, ``step`` during an optimiser step.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    step: int = 0
    host: int = 0

    @property
    def held(self) -> int:
        """Bytes on the GPU between training steps."""
        return self.weights + self.gradients + self.optimizer


def shard_size(count: int, ranks: int) -> int:
    """The size of the largest shard of ``count`` elements over ``ranks``."""
    return -(-count // ranks)


def model_states(parameters: int, zero: Zero, trained: int | None = None, block: int = 0) -> ModelStates:
    """The states of a model with ``parameters``, of which ``trained`` are trained: None all, 0 none.

    ``block``: parameters of the experts of a layer, which ZeRO-3 gathers together; 0 for a dense model.
    """
    trained = parameters if trained is None else trained
    weights, live = _weights(parameters, zero), _live(parameters, zero, block)
    if not trained:
        if zero.offload_weights:
            return ModelStates(buffers=live, host=weights)
        return ModelStates(weights, buffers=live)
    if zero.stage == 0:
        return ModelStates(
            weights, BYTES_16BIT * trained, BYTES_32BIT * trained * (1 + MOMENTS), 0, BYTES_32BIT * trained
        )
    own = shard_size(trained, zero.ranks)
    optimizer = BYTES_32BIT * own * (1 + MOMENTS)
    gradient_bytes = BYTES_32BIT if zero.fp32_gradients else BYTES_16BIT
    gradients = BYTES_16BIT * trained if zero.stage == 1 else gradient_bytes * own
    # Of DeepSpeed's BF16_Optimizer: gradients in 32 bits too, neither sharded nor copied for a step.
    summed = BYTES_32BIT * trained if zero.stage == 1 and zero.fp32_gradients and not zero.offload else 0
    bucket = BYTES_16BIT * BUCKET * (2 if zero.overlap and zero.stage < 3 else 1)
    buffers = bucket + live
    if zero.stage == 3 and block > BUCKET and trained == parameters:
        buffers += BYTES_16BIT * block  # their gradients, which the bucket cannot take
    if zero.offload:
        on_gpu = 0 if zero.stage == 3 else gradients
        return ModelStates(weights, on_gpu, 0, buffers, 0, optimizer + (BYTES_32BIT + BYTES_16BIT) * own)
    step = 0 if summed else BYTES_32BIT * (min(own, SUBGROUP) if zero.stage == 3 else own)
    return ModelStates(weights, gradients + summed, optimizer, buffers, step)


def _weights(parameters: int, zero: Zero) -> int:
    if zero.stage < 3:
        return BYTES_16BIT * parameters
    secondary = shard_size(parameters, zero.shards) if zero.shards > 1 else 0
    return BYTES_16BIT * (shard_size(parameters, zero.ranks) + secondary)


def _live(parameters: int, zero: Zero, block: int) -> int:
    """Bytes of the weights that ZeRO-3 gathers at a time: its limit does not divide a ``block``."""
    return BYTES_16BIT * max(min(parameters, LIVE), block) if zero.stage == 3 else 0
