"""What the patches of transformers 4.46 call."""

from rlhf_stack.accelerator.devices import is_gpu
from rlhf_stack.compat.attention_provider import is_flash_attention_2_served, is_flash_attention_2_served_to
from rlhf_stack.compat.flash_attention import index_first_axis, pad_input
from rlhf_stack.compat.flash_attention_2 import flash_attn_func, flash_attn_varlen_func, unpad_input
