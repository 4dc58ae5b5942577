"""flash_attn's helpers for the patches of OpenRLHF; separate, because importing it imports flash_attn."""

from rlhf_stack.compat.flash_attention import all_gather, index_first_axis, pad_input, rearrange, unpad_input
