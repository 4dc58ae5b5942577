"""flash_attn's helpers for packed samples, or functions that say that they are missing.

The stand-ins live here and not under the name ``flash_attn``, so that transformers and vLLM still see that
the package is absent. A package that is there but broken fails at import, as upstream.
"""

from typing import Any, NoReturn

__all__ = ["all_gather", "index_first_axis", "pad_input", "rearrange", "unpad_input"]

try:
    from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input
    from flash_attn.utils.distributed import all_gather
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "flash_attn":
        raise

    def _missing(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "flash_attn is not in this image, and --ds.packing_samples, --ds.ring_attn_size > 1 and "
            "--train.dynamic_batch_enable need it: leave them out, or use a CUDA image"
        )

    all_gather = index_first_axis = pad_input = rearrange = unpad_input = _missing
