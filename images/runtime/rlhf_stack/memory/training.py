"""What DeepSpeed keeps for one model on one rank: weights, gradients, optimiser states and its buffers.

All numbers are bytes. They follow DeepSpeed with 16-bit weights and Adam as OpenRLHF configures it, whose
"auto" values become DeepSpeed's own defaults, and are compared with the tensors of a real engine by
``tests/image/test_memory.py``.
"""

from dataclasses import dataclass

BYTES_16BIT, BYTES_32BIT = 2, 4  # bytes of a 16-bit and of a 32-bit number
MOMENTS = 2  # Adam's, for each parameter
BUCKET = 500_000_000  # numbers: DeepSpeed's reduce_bucket_size
LIVE = 1_000_000_000  # numbers: its stage3_max_live_parameters
SUBGROUP = 1_000_000_000  # numbers: its sub_group_size, which ZeRO-3 steps at a time


@dataclass(frozen=True)
class Zero:
    """How a model is spread over ``ranks`` data-parallel ranks.

    ``offload`` is of the optimiser to the host, ``offload_weights`` of the weights of a model that is not
    trained. ``fp32_gradients``: they are summed in 32 bits. ``shards``: ranks that hold the weights of
    ZeRO-3 together (ZeRO++ hpZ keeps a second copy among so many), 1 for none.
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
    """Bytes on one GPU, and on the host for one rank.

    ``buffers`` are there while a pass runs, ``step`` while the optimiser steps.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    step: int = 0
    host: int = 0

    @property
    def held(self) -> int:
        """What stays between steps of training."""
        return self.weights + self.gradients + self.optimizer


def shard_size(count: int, ranks: int) -> int:
    """The largest part of ``count`` things that are split among ``ranks``."""
    return -(-count // ranks)


def model_states(parameters: int, zero: Zero, trained: int | None = None) -> ModelStates:
    """For a model of ``parameters`` of which ``trained`` are trained: all if None, none if 0."""
    trained = parameters if trained is None else trained
    weights = _weights(parameters, zero)
    if not trained:
        if zero.offload_weights:
            return ModelStates(buffers=min(BYTES_16BIT * parameters, BYTES_16BIT * LIVE), host=weights)
        return ModelStates(weights, buffers=_live(parameters, zero))
    if zero.stage == 0:
        return ModelStates(
            weights, BYTES_16BIT * trained, BYTES_32BIT * trained * (1 + MOMENTS), 0, BYTES_32BIT * trained
        )
    own = shard_size(trained, zero.ranks)
    kept = BYTES_32BIT * own * (1 + MOMENTS)
    wide = BYTES_32BIT if zero.fp32_gradients else BYTES_16BIT
    gradients = BYTES_16BIT * trained if zero.stage == 1 else wide * own
    bucket = BYTES_16BIT * BUCKET * (2 if zero.overlap and zero.stage < 3 else 1)
    buffers = bucket + _live(parameters, zero)
    if zero.offload:
        here = 0 if zero.stage == 3 else gradients
        return ModelStates(weights, here, 0, buffers, 0, kept + (BYTES_32BIT + BYTES_16BIT) * own)
    step = BYTES_32BIT * (min(own, SUBGROUP) if zero.stage == 3 else own)
    return ModelStates(weights, gradients, kept, buffers, step)


def _weights(parameters: int, zero: Zero) -> int:
    if zero.stage < 3:
        return BYTES_16BIT * parameters
    second = shard_size(parameters, zero.shards) if zero.shards > 1 else 0
    return BYTES_16BIT * (shard_size(parameters, zero.ranks) + second)


def _live(parameters: int, zero: Zero) -> int:
    """Weights that ZeRO-3 has gathered at a time."""
    return BYTES_16BIT * min(parameters, LIVE) if zero.stage == 3 else 0
