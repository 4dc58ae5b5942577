"""Attention over vLLM 0.4.2's paged cache, in PyTorch, told what its own backends for GPUs are told."""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadataPerStage


@dataclass
class Stage(AttentionMetadataPerStage):
    """What vLLM's model runner says of the prompts, or of the answers, in a step."""

    is_prompt: bool
    seq_lens: list[int] | None
    seq_lens_tensor: torch.Tensor
    max_query_len: int | None
    max_seq_len: int
    subquery_start_loc: torch.Tensor | None
    seq_start_loc: torch.Tensor | None
    context_lens_tensor: torch.Tensor | None
    block_tables: torch.Tensor
    use_cuda_graph: bool


class Paged(AttentionImpl):
    """As many heads of keys as of queries, and no bias."""

    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None
    ):
        assert num_kv_heads in (None, num_heads)
        assert alibi_slopes is None
        assert sliding_window is None
        self.shape, self.scale = (-1, num_heads, head_size), scale

    def forward(self, query, key, value, kv_cache, attn_metadata, kv_scale=1.0):
        """``query``, ``key``, ``value`` and the result: tokens x heads of this rank * elements."""
        assert kv_scale == 1
        query, key, value = (tensor.view(self.shape) for tensor in (query, key, value))
        for held, new in zip(kv_cache, (key, value), strict=True):
            held.flatten(0, 1)[attn_metadata.slot_mapping] = new
        if (prompts := attn_metadata.prefill_metadata) is not None:
            found = self._prompts(query, key, value, prompts)
        else:
            found = self._answers(query, kv_cache, attn_metadata.decode_metadata)
        return found.flatten(1)

    def _prompts(self, query, key, value, stage):
        assert not stage.block_tables.numel(), "no prompt was read before"
        found = [
            self._attention(*parts, is_causal=True)
            for parts in zip(*(tensor.split(stage.seq_lens) for tensor in (query, key, value)), strict=True)
        ]
        return torch.cat(found)

    def _answers(self, query, kv_cache, stage):
        """One token of each sequence, to all before it."""
        keys, values = (held[stage.block_tables].flatten(1, 2) for held in kv_cache)
        there = torch.arange(keys.shape[1]) < stage.seq_lens_tensor[:, None]
        return self._attention(query[:, None], keys, values, attn_mask=there[:, None, None])[:, 0]

    def _attention(self, query, key, value, **options):
        """Of (sequences x) tokens x heads x elements."""
        heads_first = (tensor.transpose(-3, -2) for tensor in (query, key, value))
        return scaled_dot_product_attention(*heads_first, scale=self.scale, **options).transpose(-3, -2)


class Backend(AttentionBackend):
    @staticmethod
    def get_impl_cls():
        return Paged

    @staticmethod
    def make_metadata(*arguments, **options):
        return Stage(*arguments, **options)

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
        return 2, num_blocks, block_size, num_kv_heads, head_size

    @staticmethod
    def swap_blocks(src_kv_cache, dst_kv_cache, src_to_dst):
        raise NotImplementedError("the cache is large enough")

    @staticmethod
    def copy_blocks(kv_caches, src_to_dists):
        raise NotImplementedError("no request here asks for several answers")
