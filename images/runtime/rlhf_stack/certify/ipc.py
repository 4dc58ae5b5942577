"""The rung ``ipc``: a tensor of this process is opened by another one, as a colocated sync does."""

import pickle
import subprocess
import sys
import time

from rlhf_stack.accelerator import devices
from rlhf_stack.certify.ladder import Found, Place
from rlhf_stack.certify.model import Measurement
from rlhf_stack.lazy import torch
from rlhf_stack.sync.digest import checksum

SECONDS = 120
ELEMENTS, SMALL_ELEMENTS = 1 << 27, 1 << 20


def climb(place: Place) -> Found:
    """Compare the checksum that the other process computes; on a CPU the handle contains the bytes."""
    from torch.multiprocessing.reductions import reduce_tensor

    torch.manual_seed(0)
    count = SMALL_ELEMENTS if place.small else ELEMENTS
    tensor = torch.randint(0, 1 << 15, (count,), device=devices.torch_device()).to(torch.int16)
    own = checksum(tensor)
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_stack.certify.ipc", str(devices.current_device())],
        input=pickle.dumps(reduce_tensor(tensor)),
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"the other process failed: {''.join(last)}")
    theirs = done.stdout.decode().split()[-1]
    return Found(
        [Measurement("seconds until the other process has read it", time.monotonic() - start, "s")],
        {"bytes": tensor.numel() * tensor.element_size(), "is_gpu": devices.is_gpu(), "checksum": own},
        "" if theirs == own else f"the other process read {theirs}, this one has {own}",
    )


def main() -> None:
    """Open the handle on standard input, on the GPU of the argument, and print its tensor's checksum."""
    index = int(sys.argv[1]) if devices.is_gpu() else None
    if index is not None:
        devices.set_device(index)
    handle = pickle.loads(sys.stdin.buffer.read())  # noqa: S301  (of the parent process)
    print(checksum(devices.open_handle(handle, index)))


if __name__ == "__main__":
    main()
