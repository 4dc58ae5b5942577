"""In place of the GPUs of a Ray worker process: its CPU. Everything that decides which GPU it is stays.

`install` is a setup hook of Ray's worker processes, for images of vLLM 0.4.2 that are made for GPUs. What it
replaces are the calls that reach a device:

* the functions of `rlhf_stack.accelerator.devices` through which OpenRLHF asks for its device. Which GPU Ray assigned,
  and which variables an engine's workers get, is decided by the image's own code, as on a GPU;
* DeepSpeed's fused optimiser, by torch's, and its own collectives in shared memory, by gloo;
* in the processes of an engine, what `worker_of_vllm_0_4` says.
"""

from functools import partial

from rlhf_stack.accelerator import devices
from rlhf_stack.compat import deepspeed_ops
from rlhf_stack.engine import startup, worker_extension
from rlhf_stack.sync import gloo


def install():
    """Replace them in this process; torch, DeepSpeed and vLLM are not imported before they are used."""
    devices.device_type = lambda: "cpu"
    devices.current_device = devices.torch_device = cpu
    devices.set_device = choose_gloo
    devices.synchronize = devices.empty_cache = devices.current_stream = lambda: None
    deepspeed_ops.adam_class = adam
    gloo.Buffers = partial(pageable, gloo.Buffers)
    worker_extension.WORKERS["cpu"] = worker_extension.WORKERS["cuda"]
    startup.join = partial(join, startup.join)


def cpu():
    import torch

    return torch.device("cpu")


def choose_gloo(_local_rank):
    """Called before the trainer's ranks meet, when DeepSpeed would compile collectives of its own."""
    from deepspeed import ops as of_deepspeed

    of_deepspeed.__compatible_ops__["deepspeed_shm_comm"] = False


def adam(offload):
    import torch

    assert not offload
    return torch.optim.AdamW


def pageable(buffers, device, pinned):
    """Buffers in memory that is not pinned, which takes a GPU."""
    assert pinned
    return buffers(device, pinned=False)


def join(of_the_image, own):
    """Each process of an engine calls this first, before it asks vLLM for anything."""
    import worker_of_vllm_0_4

    worker_of_vllm_0_4.install()
    of_the_image(own)
