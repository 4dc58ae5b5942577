"""Replace the GPU of a Ray worker process by its CPU; the code that decides which GPU it is remains.

`install` is a setup hook of Ray's worker processes, for GPU images of vLLM 0.4.2. It replaces the calls that
reach a device:

* the functions of `rlhf_stack.accelerator.devices` that return OpenRLHF's device. The image's own code
  decides which GPU Ray assigned and which variables an engine's workers get, as on a GPU;
* DeepSpeed's fused optimizer, by torch's, and its own collectives in shared memory, by gloo;
* in the processes of an engine, what `worker_of_vllm_0_4` lists.

It must run before `rlhf_stack.hooks.openrlhf_v0_5` is imported, whose names refer to these functions.
"""

from functools import partial

from rlhf_stack.accelerator import devices
from rlhf_stack.compat import deepspeed_ops
from rlhf_stack.engine import startup, worker_extension
from rlhf_stack.sync import gloo


def install():
    """Replace the calls in this process; torch, DeepSpeed and vLLM are imported at their first use only."""
    devices.device_type = lambda: "cpu"
    devices.current_device = devices.torch_device = cpu
    devices.set_device = disable_shm_collectives
    devices.synchronize = devices.empty_cache = devices.current_stream = lambda: None
    deepspeed_ops.adam_class = adam
    gloo.Buffers = partial(pageable_buffers, gloo.Buffers)
    worker_extension.WORKERS["cpu"] = worker_extension.WORKERS["cuda"]
    startup.join = partial(join, startup.join)


def cpu():
    import torch

    return torch.device("cpu")


def disable_shm_collectives(_local_rank):
    """Make DeepSpeed use gloo; in the trainer's rendezvous, which follows, it would compile collectives."""
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def adam(offload):
    import torch

    assert not offload
    return torch.optim.AdamW


def pageable_buffers(buffers, device, **_):
    """Create buffers in pageable memory: pinned memory needs a GPU."""
    return buffers(device, pinned=False)


def join(original, engine):
    """Replace vLLM's worker first: each process of an engine calls `join` before it uses vLLM."""
    import worker_of_vllm_0_4

    worker_of_vllm_0_4.install()
    original(engine)
