"""Attention over vLLM 0.4.2's paged cache in PyTorch, with the interface of vLLM's backends for GPUs."""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadataPerStage


@dataclass
class StageMetadata(AttentionMetadataPerStage):
    """The fields that vLLM's model runner sets for the prompts, or for the answers, of one step."""

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


class PagedAttention(AttentionImpl):
    """Attention with as many key heads as query heads, and no bias."""

    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None
    ):
        assert num_kv_heads in (None, num_heads)
        assert alibi_slopes is None
        assert sliding_window is None
        self.shape, self.scale = (-1, num_heads, head_size), scale

    def forward(self, query, key, value, kv_cache, attn_metadata, kv_scale=1.0):
        """Write new keys and values to the cache, and attend. Tensors: tokens x (this rank's heads * n)."""
        assert kv_scale == 1
        query, key, value = (tensor.view(self.shape) for tensor in (query, key, value))
        for cache, new in zip(kv_cache, (key, value), strict=True):
            cache.flatten(0, 1)[attn_metadata.slot_mapping] = new
        if (prompts := attn_metadata.prefill_metadata) is not None:
            output = self._prompts(query, key, value, prompts)
        else:
            output = self._answers(query, kv_cache, attn_metadata.decode_metadata)
        return output.flatten(1)

    def _prompts(self, query, key, value, stage):
        assert not stage.block_tables.numel(), "prefix caching is not supported"
        outputs = [
            self._attention(*parts, is_causal=True)
            for parts in zip(*(tensor.split(stage.seq_lens) for tensor in (query, key, value)), strict=True)
        ]
        return torch.cat(outputs)

    def _answers(self, query, kv_cache, stage):
        """Attention of each sequence's last token to the whole sequence."""
        keys, values = (cache[stage.block_tables].flatten(1, 2) for cache in kv_cache)
        valid = torch.arange(keys.shape[1]) < stage.seq_lens_tensor[:, None]
        return self._attention(query[:, None], keys, values, attn_mask=valid[:, None, None])[:, 0]

    def _attention(self, query, key, value, **options):
        """Attention of tensors of (sequences x) tokens x heads x size."""
        heads_first = (tensor.transpose(-3, -2) for tensor in (query, key, value))
        return scaled_dot_product_attention(*heads_first, scale=self.scale, **options).transpose(-3, -2)


class Backend(AttentionBackend):
    """The backend that vLLM's `get_attn_backend` returns; its cache never swaps or copies blocks."""

    @staticmethod
    def get_impl_cls():
        return PagedAttention

    @staticmethod
    def make_metadata(*arguments, **options):
        return StageMetadata(*arguments, **options)

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
        return 2, num_blocks, block_size, num_kv_heads, head_size

    @staticmethod
    def swap_blocks(src_kv_cache, dst_kv_cache, src_to_dst):
        raise NotImplementedError("swapping: the cache is large enough for the tests")

    @staticmethod
    def copy_blocks(kv_caches, src_to_dists):
        raise NotImplementedError("copying blocks: no request of the tests has several answers")
