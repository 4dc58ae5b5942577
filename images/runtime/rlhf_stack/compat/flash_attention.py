"""flash_attn's helpers for packed samples: its own where it is installed, plain PyTorch otherwise.

The replacements are not named ``flash_attn``, so that transformers and vLLM still find it absent. A package
that is installed but broken fails at import, as upstream.
"""

from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

__all__ = ["all_gather", "index_first_axis", "pad_input", "rearrange", "unpad_input"]

try:
    from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input
    from flash_attn.utils.distributed import all_gather
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "flash_attn":
        raise
    from einops import rearrange

    def unpad_input(
        states: "torch.Tensor", mask: "torch.Tensor"
    ) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]":
        """Remove padding: ``states`` (batch, length, ...) where ``mask`` (batch, length) is not 0.

        Returns the tokens (total, ...), their indices in the flattened batch, the offsets of the sequences
        (int32, batch + 1), the longest length, and the length of each sequence.
        """
        import torch

        lengths = mask.sum(dim=-1, dtype=torch.int32)
        indices = mask.flatten().nonzero().flatten()
        offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return states.flatten(0, 1)[indices], indices, offsets, int(lengths.max()), lengths

    def pad_input(states: "torch.Tensor", indices: "torch.Tensor", batch: int, length: int) -> "torch.Tensor":
        """Reverse `unpad_input`: tokens (total, ...) to (batch, length, ...), 0 at padding."""
        padded = states.new_zeros(batch * length, *states.shape[1:])
        return padded.index_copy(0, indices, states).unflatten(0, (batch, length))

    def index_first_axis(states: "torch.Tensor", indices: "torch.Tensor") -> "torch.Tensor":
        """The rows of ``states`` (rows, ...) at ``indices``."""
        return states[indices]

    def all_gather(*_: Any, **__: Any) -> NoReturn:
        """Refuse ring attention, which only flash_attn and ring_flash_attn compute."""
        raise RuntimeError(
            "--ds.ring_attn_size > 1 needs flash_attn and ring_flash_attn, which are not in this image: "
            "leave it out, or build the image with `python -m scripts build CELL --with flash-attn` and add "
            "the package ring_flash_attn in an image derived from it"
        )
