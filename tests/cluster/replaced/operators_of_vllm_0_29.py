"""The operators that vLLM 0.29 calls on a device, in torch; a GPU wheel has them for GPUs only.

Names and schemas are those of vLLM's own extension for CPUs. What the tests do not need (a sliding window,
ALiBi, sinks, a cache in fp8, fewer key heads than query heads) is an error.
"""

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "_C"
NO_SLOT = -1  # of padding tokens

library = torch.library.Library(NAMESPACE, "FRAGMENT")


def operator(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define an operator of `NAMESPACE` that the decorated function implements."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
        return function

    return define


@operator("init_cpu_memory_env(SymInt[] node_ids) -> ()")
def bind_memory(nodes: list[int]) -> None:
    """Leave the placement of memory on NUMA nodes to the kernel."""


@operator("silu_and_mul(Tensor(a!) out, Tensor input) -> ()")
def silu_and_mul(out: torch.Tensor, both: torch.Tensor) -> None:
    """Write silu(gate) * value to ``out`` (tokens x n), from gate and value side by side (tokens x 2n)."""
    gate, value = both.chunk(2, dim=-1)
    torch.mul(torch.nn.functional.silu(gate), value, out=out)


@operator(
    "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
    "Tensor(a3!) slot_mapping, SymInt block_size) -> ()"
)
def find_slots(
    starts: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor, size: int
) -> None:
    """Write each token's cache slot; request i has tokens ``starts[i]`` to ``starts[i + 1]`` of the batch."""
    lengths = starts.diff()
    request = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = positions[: len(request)]
    slots.fill_(NO_SLOT)
    slots[: len(request)] = blocks[request, position // size].long() * size + position % size


@operator(
    "get_scheduler_metadata(int num_req, int num_heads_q, int num_heads_kv, int head_dim, Tensor seq_lens, "
    "ScalarType dtype, Tensor query_start_loc, bool casual, int window_size, str isa_hint, "
    "bool enable_kv_split, Tensor? dynamic_causal, str kv_cache_dtype) -> Tensor"
)
def plan_attention(*_: Any) -> torch.Tensor:
    """Return an empty plan: attention uses one thread."""
    return torch.empty(0)


@operator(
    "cpu_attn_reshape_and_cache(Tensor key, Tensor value, Tensor(a2!) key_cache, Tensor(a3!) value_cache, "
    "Tensor slot_mapping, str isa, float k_scale, float v_scale, str kv_cache_dtype) -> ()"
)
def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    _isa: str,
    _key_scale: float,
    _value_scale: float,
    dtype: str,
) -> None:
    """Write keys and values (tokens x heads x n) of new tokens to the cache (blocks x heads x size x n)."""
    _refuse(fp8=dtype.startswith("fp8"))
    token = (slots != NO_SLOT).nonzero().squeeze(1)
    block, place = slots[token] // keys.shape[2], slots[token] % keys.shape[2]
    keys[block, :, place] = key[token]
    values[block, :, place] = value[token]


@operator(
    "cpu_attention_with_kv_cache(Tensor query, Tensor key_cache, Tensor value_cache, Tensor(a3!) output, "
    "Tensor query_start_loc, Tensor seq_lens, float scale, bool causal, Tensor? alibi_slopes, "
    "SymInt sliding_window_size, Tensor block_table, float softcap, Tensor scheduler_metadata, "
    "Tensor? s_aux, Tensor? dynamic_causal, float k_scale, float v_scale, str kv_cache_dtype) -> ()"
)
def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    causal: bool,
    slopes: torch.Tensor | None,
    window: int,
    blocks: torch.Tensor,
    cap: float,
    _plan: torch.Tensor,
    sinks: torch.Tensor | None,
    which_causal: torch.Tensor | None,
    _key_scale: float,
    _value_scale: float,
    dtype: str,
) -> None:
    """Attend from the new tokens of each request (tokens x heads x n) to all of its tokens in the cache."""
    _refuse(
        alibi=slopes is not None,
        window=window != -1,
        cap=cap != 0,
        sinks=sinks is not None,
        not_causal=not causal or which_causal is not None,
        fp8=dtype.startswith("fp8"),
    )
    size, bounds = keys.shape[2], starts.tolist()
    for index, length in enumerate(lengths[: len(bounds) - 1].tolist()):
        new = slice(bounds[index], bounds[index + 1])
        count = new.stop - new.start
        own = blocks[index, : -(-length // size)].long()
        seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[new].transpose(0, 1),
            _contiguous(keys[own], length),
            _contiguous(values[own], length),
            attn_mask=seen,
            scale=scale,
        )
        output[new] = attended.transpose(0, 1)


def _contiguous(cached: torch.Tensor, length: int) -> torch.Tensor:
    """Return the blocks of one request (blocks x heads x size x n) as heads x length x n."""
    return cached.transpose(0, 1).flatten(1, 2)[:, :length]


def _refuse(**features: bool) -> None:
    requested = [name for name, is_requested in features.items() if is_requested]
    if requested:
        raise NotImplementedError(f"the replaced device does not support: {', '.join(requested)}")
