"""What the patches of Ray call. Ray imports it at start-up, so it imports nothing outside this package."""

from rlhf_stack.accelerator.rocm import count as amd_gpu_count
from rlhf_stack.accelerator.rocm import is_rocm
from rlhf_stack.accelerator.rocm import product as amd_gpu_product
from rlhf_stack.accelerator.rocm import restrict_process as restrict_to_amd_gpus
from rlhf_stack.accelerator.rocm import visible_ids as visible_amd_gpu_ids
from rlhf_stack.accelerator.visible_devices import noset_enabled
from rlhf_stack.cluster.ports import first_worker_port
