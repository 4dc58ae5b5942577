"""What the patches of vLLM call. torch, ray and vllm are imported when a function needs them."""

from rlhf_stack.accelerator.devices import environment_for as environment_for_gpus
from rlhf_stack.accelerator.devices import is_gpu
from rlhf_stack.accelerator.rocm import join_ray
from rlhf_stack.cluster.assigned_gpu import local_rank
from rlhf_stack.compat.rope_scaling import llama3_frequencies, verified_rope_scaling
from rlhf_stack.compat.vllm_cpu_weights import skip_weight_prepack
