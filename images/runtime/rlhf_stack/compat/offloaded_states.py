"""Host copies of optimizer states that a checkpoint of DeepSpeed's ZeRO-3 brings onto the GPU."""

from typing import Any

HOST_COPY = "_offload_buffer"  # the end of their names, of deepspeed.runtime.zero.offload_states


def drop_loaded_copies(optimizer: Any) -> None:
    """Remove each host copy that is not on the host from the states of torch's ``optimizer``.

    DeepSpeed 0.19 saves the copies with the states, and torch loads every state to the device of its
    parameter. States "offloaded" to such a copy stay on the GPU while engines generate. DeepSpeed makes a
    copy that is missing.
    """
    for state in optimizer.state.values():
        for name in [name for name in state if name.endswith(HOST_COPY)]:
            if state[name].device.type != "cpu":
                del state[name]
