"""Climbs what needs only torch, on a machine without an image: ``python3 -m rlhf_stack.certify.kit FOLDER``.

``python -m scripts gpu-kit`` packs this package. The digest in ``kit.json`` next to it goes into the
certificate. All other rungs are in it as not climbed.
"""

import json
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_stack.lazy import torch

if TYPE_CHECKING:
    from rlhf_stack.certify.ladder import Step
    from rlhf_stack.certify.model import Record

DIGEST = Path(__file__).parents[2] / "kit.json"


def report(step: "Step", record: "Record | None") -> None:
    """Print what is climbed now to the standard error, and its result to the standard output."""
    from rlhf_stack.certify.certificate import line

    text = line(step, record)
    print(text if record else f"... {text}", file=sys.stdout if record else sys.stderr, flush=True)


def main() -> int:
    """Climb, write the certificate to FOLDER, which must be new, and return 1 if a rung failed."""
    from rlhf_stack.accelerator import devices, rocm
    from rlhf_stack.certify.certificate import certify
    from rlhf_stack.certify.climb import INTERRUPTED
    from rlhf_stack.certify.ladder import NAMES, Place
    from rlhf_stack.certify.model import FAILED, Machine, Subject
    from rlhf_stack.diagnostics.host_check import nvidia_driver

    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "certificate")
    if folder.exists():
        sys.exit(f"error: {folder}: it exists already; a certificate is never overwritten")
    if find_spec("torch") is None:
        sys.exit(f"error: {sys.executable} has no torch: put a python3 with torch first on PATH")
    digest = str(json.loads(DIGEST.read_text(encoding="utf-8"))["digest"]) if DIGEST.exists() else ""
    count = torch.cuda.device_count()
    model = torch.cuda.get_device_name() if count else ""
    print(f"torch {torch.__version__}, {count} GPUs {model}".rstrip(), flush=True)
    driver = rocm.driver() if devices.kind() == "rocm" else nvidia_driver()
    machine = Machine(count, model, driver)
    with tempfile.TemporaryDirectory() as temporary:
        place = Place("", temporary, small=not count)
        found = certify(place, NAMES, Subject("", "", "", digest), [machine], folder, report)
    print(f"{folder}/certificate.json", flush=True)
    if any(rung.reason == INTERRUPTED for rung in found.rungs):
        return 128 + signal.SIGINT
    return 1 if any(rung.state == FAILED for rung in found.rungs) else 0


if __name__ == "__main__":
    sys.exit(main())
