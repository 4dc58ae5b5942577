"""A checkpoint that does not fit on the disk; tests/faults has a whole run with a full disk."""

import pytest

FULL = """
import resource
import signal

import deepspeed
import torch

from openrlhf.utils.deepspeed import DeepspeedStrategy

alone()
replace(torch.cuda, synchronize=lambda: None)  # upstream's barrier needs a GPU
ROOM = 100_000  # bytes of a file, as on a disk that fills up


@stub("DeepSpeed's engine, which writes a tensor")
class Engine(deepspeed.DeepSpeedEngine):
    def __init__(self):
        torch.nn.Module.__init__(self)

    def save_checkpoint(self, save_dir, tag, **options):
        torch.save(torch.zeros(ROOM), Path(save_dir, tag))


signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))
folder = Path("checkpoints").absolute()
try:
    DeepspeedStrategy.__new__(DeepspeedStrategy).save_ckpt(Engine(), str(folder), tag="step")
except Exception as error:
    message = str(error)
else:
    raise SystemExit("the checkpoint was written, although it does not fit")
print(message.splitlines()[0])
expected = f"rank 0 on node {os.uname().nodename} ", f"the checkpoint in {folder} is incomplete"
sys.exit(not all(part in message for part in expected))
"""


@pytest.mark.patch(
    "openrlhf/0.11.2/0055-name-failed-checkpoints", "openrlhf/0.5.1/0037-name-failed-checkpoints"
)
def test_a_checkpoint_that_cannot_be_written_is_named(proves):
    proves(FULL, r"unexpected pos|File too large")
