"""Certify this image on your own machines: climb a fixed ladder of tests and write a certificate.

The rungs, in order: facts of every node, attention forward and backward against 32 bits, all-reduce between
GPUs, the sync network, buckets and checksums in device memory, NCCL's streams and deadlines, weight sync over
each backend, CUDA IPC, sleep and wake, training steps with separate and with colocated engines, estimates of
memory against real peaks, tokens per second (of several engines also next to a waiting rank), and a killed
rank. A rung that fails stops no other one; each has a deadline. Nothing else may use the GPUs meanwhile.

  rlhf-stack certify                               # the running cluster, or else this machine
  rlhf-stack certify --rung attention --rung sync  # a part; the other rungs are not climbed
  rlhf-stack certify --fake-gpus 2,2               # in an image for CPUs: two nodes of two fake GPUs

It writes certificate.json and the raw record of each rung to --out. `python -m scripts certificates add FILE`
of the repository checks both; sign the file before, if you like, with
`ssh-keygen -Y sign -f KEY -n rlhf-stack-certificate certificate.json`. The records contain host names.

Interrupted (Ctrl-C, SIGTERM), it climbs no further, and writes the certificate of what it has climbed.

Exit code 1 if a rung failed. --json prints rlhf-stack/certify/1: `file`, `passed`, `failed`, `not_climbed`
(numbers of rungs), and `rungs` (name, title, state, reason, seconds, measurements: name, value, unit; record:
the sha256 of its raw record), as in the certificate.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_stack.cli.json_output import print_json
from rlhf_stack.cli.option_types import gpu_count
from rlhf_stack.config import env_vars
from rlhf_stack.errors import UserError
from rlhf_stack.telemetry import run_log
from rlhf_stack.telemetry.run_log import messages

if TYPE_CHECKING:
    from rlhf_stack.certify.climb import Report
    from rlhf_stack.certify.ladder import Step
    from rlhf_stack.certify.model import Record

FAKE_GPUS = (2, 2)
MOST_FAKE = 16  # nodes, each of which has processes of Ray on this machine


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the cluster, the rungs and the output."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("certificate"),
        metavar="FOLDER",
        help="a new folder for the certificate and its records (./certificate)",
    )
    parser.add_argument("--ray", default="auto", metavar="ADDRESS", help="address of the cluster (auto)")
    parser.add_argument(
        "--rung", action="append", metavar="NAME", help="climb only this rung and the facts; repeatable"
    )
    parser.add_argument(
        "--fake-gpus",
        type=fake_gpus,
        metavar="N,N",
        help="in an image for CPUs, without a cluster: fake GPUs of each simulated node (2,2)",
    )
    parser.add_argument("--json", action="store_true", help="print rlhf-stack/certify/1 (see above)")


def fake_gpus(text: str) -> tuple[int, ...]:
    """Numbers of GPUs of at most `MOST_FAKE` nodes, separated by commas."""
    parts = text.split(",")
    if len(parts) > MOST_FAKE:
        raise argparse.ArgumentTypeError(f"{len(parts)} nodes: expected at most {MOST_FAKE}")
    return tuple(map(gpu_count, parts))


def run(options: argparse.Namespace) -> int:
    """Climb the ladder; return 1 if a rung failed."""
    from rlhf_stack.accelerator import devices
    from rlhf_stack.certify import ladder
    from rlhf_stack.inputs.text import suggestion

    env_vars.check()
    run_log.configure_messages()
    chosen = ("facts", *(options.rung or ladder.NAMES))
    for name in chosen:
        if name not in ladder.NAMES:
            meant = suggestion(name, ladder.NAMES)
            raise UserError(f"no rung {name!r}{meant}; the rungs are {', '.join(ladder.NAMES)}")
    if devices.is_gpu() and options.fake_gpus:
        raise UserError("--fake-gpus: this image is for GPUs; use an image for CPUs")
    try:
        options.out.mkdir(parents=True)
    except FileExistsError:
        raise UserError(
            f"--out {options.out}: it exists already; a certificate is never overwritten"
        ) from None
    try:
        return _climb(options, chosen)
    finally:
        with suppress(OSError):
            options.out.rmdir()  # if it is empty: nothing was climbed


def _climb(options: argparse.Namespace, chosen: tuple[str, ...]) -> int:
    from rlhf_stack.accelerator import devices
    from rlhf_stack.certify import ladder, on_cluster
    from rlhf_stack.certify.certificate import FILE, certify
    from rlhf_stack.certify.climb import INTERRUPTED
    from rlhf_stack.certify.model import FAILED, NOT_CLIMBED, PASSED, Subject
    from rlhf_stack.config import image

    about = image.about()
    subject = Subject(about.cell, about.release, about.inputs)
    temporary = tempfile.TemporaryDirectory(prefix="rlhf-stack-certify-", ignore_cleanup_errors=True)
    requested = () if devices.is_gpu() else options.fake_gpus or ()
    default = () if devices.is_gpu() else FAKE_GPUS
    with temporary as folder, on_cluster.cluster(options.ray, requested, default) as address:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, in place of Ray's handler
        place = ladder.Place(address, folder, small=not devices.is_gpu())
        try:
            with _reported() as report:
                found = certify(place, chosen, subject, None, options.out, report)
        finally:
            on_cluster.remove(place)
    counts = {
        state: sum(rung.state == state for rung in found.rungs) for state in (PASSED, FAILED, NOT_CLIMBED)
    }
    file = options.out / FILE
    if options.json:
        print_json(
            "certify",
            1,
            file=str(file),
            passed=counts[PASSED],
            failed=counts[FAILED],
            not_climbed=counts[NOT_CLIMBED],
            rungs=[asdict(rung) for rung in found.rungs],
        )
    else:
        sys.stderr.flush()
        print(f"{file}: {', '.join(f'{count} {state}' for state, count in counts.items() if count)}")
    if any(rung.reason == INTERRUPTED for rung in found.rungs):
        return 128 + signal.SIGINT  # the JSON of an error would be a second one
    return 1 if counts[FAILED] else 0


@contextmanager
def _reported() -> Iterator["Report"]:
    """What shows the climb while it lasts: messages if they are JSON lines, else lines and a status."""
    from rlhf_stack.certify.certificate import line
    from rlhf_stack.certify.model import FAILED, PASSED

    if env_vars.log_format() == "json":
        yield lambda step, record: messages.info(line(step, record))
        return
    from rich.console import Console

    styles = {PASSED: "green", FAILED: "red bold"}
    console = Console(stderr=True, soft_wrap=True)
    with console.status("starting") as status:

        def report(step: "Step", record: "Record | None") -> None:
            if record is None:
                status.update(line(step, record))
            else:
                console.print(
                    line(step, record), style=styles.get(record.state), highlight=False, markup=False
                )

        yield report
