"""Climbs the ladder: each rung in a process of its own with a deadline, and none stops the next one."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from rlhf_stack.certify.ladder import LADDER, NotClimbedError, Place, Step
from rlhf_stack.certify.model import FAILED, NOT_CLIMBED, PASSED, Measurement, Record, worst
from rlhf_stack.known_bad.first_error import first_error
from rlhf_stack.known_bad.matching import COLOURS

LOG_BYTES = 40_000
NAMING_SECONDS = 30.0  # before the deadline of a rung, so that its own error names the GPU that is late
CLUSTER_NEEDED = "it needs Ray, vLLM and OpenRLHF of an image"
Report = Callable[[Step, Record | None], None]  # called before (None) and after a rung is climbed
INTERRUPTED = "certify was interrupted"


def climb(place: Place, chosen: Sequence[str], report: Report) -> Iterator[Record]:
    """Yield the record of each rung of the ladder.

    Those that are not ``chosen`` are not climbed, none after the facts if the image's GPUs are missing, and
    none after Ctrl-C, which ends the current one.
    """
    obstacle = ""
    for step in LADDER:
        if step.name not in chosen:
            record = Record(step.name, NOT_CLIMBED, "it was not selected", 0.0)
        elif step.on == "cluster" and not place.address:
            record = Record(step.name, NOT_CLIMBED, CLUSTER_NEEDED, 0.0)
        elif obstacle:
            record = Record(step.name, NOT_CLIMBED, obstacle, 0.0)
        else:
            report(step, None)
            try:
                record = in_process(step, place)
            except KeyboardInterrupt:
                obstacle = INTERRUPTED
                record = Record(step.name, NOT_CLIMBED, obstacle, 0.0)
        if step.name == "facts":
            obstacle = obstacle or missing_gpus(record)
        report(step, record)
        yield record


def missing_gpus(facts: Record) -> str:
    """Why no further rung can be climbed: the image is for GPUs, and no node has one; "" otherwise."""
    nodes = list(facts.details.values())
    kinds = {node["accelerator"] for node in nodes if isinstance(node, dict)}
    if kinds & {"cuda", "rocm"} and not any(node["gpus"] for node in nodes):
        return "this image is for GPUs, and no node has one that its driver shows"
    return ""


def in_process(step: Step, place: Place) -> Record:
    """Climb a rung in a process of its own; at the deadline it is killed with its children."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "record.json")
        start = time.monotonic()
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "rlhf_stack.certify.climb",
                json.dumps(asdict(step)),
                json.dumps(asdict(place)),
                str(result),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(step.seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
        seconds = round(time.monotonic() - start, 1)
        output.seek(max(0, output.seek(0, os.SEEK_END) - LOG_BYTES))
        log = output.read().decode(errors="replace")
        if result.exists():
            content = json.loads(result.read_text(encoding="utf-8"))
            measured = [Measurement(**one) for one in content.pop("measurements")]
            return explained(Record(**(content | {"measurements": measured, "seconds": seconds, "log": log})))
    why = f"not done after {step.seconds:.0f} s" if code is None else f"its process ended with code {code}"
    return explained(Record(step.name, FAILED, why, seconds, log=log))


def explained(record: Record) -> Record:
    """A failed rung's record, its reason followed by the first error of its processes if that is another."""
    first = first_error(record.log, complete=False) if record.state == FAILED else None
    if first is None or first.text in record.reason:
        return record
    return replace(record, reason=f"{record.reason}; first error: {first.text}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def attempt(step: Step, place: Place) -> Record:
    """Climb a rung in this process; no error leaves it."""

    def climbed() -> Record:
        start = time.monotonic()
        found = step.load()(place)
        state = FAILED if found.problem else PASSED
        seconds = time.monotonic() - start
        return Record(step.name, state, found.problem, seconds, found.measurements, found.details)

    return recorded(step, climbed)


def recorded(step: Step, climbed: Callable[[], Record]) -> Record:
    """The record that ``climbed`` returns, or one of its error."""
    import traceback

    start = time.monotonic()
    try:
        return climbed()
    except NotClimbedError as error:
        return Record(step.name, NOT_CLIMBED, str(error), time.monotonic() - start)
    except Exception as error:
        traceback.print_exc()
        first = (COLOURS.sub("", str(error)).strip().splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first}"
        return Record(step.name, FAILED, reason, time.monotonic() - start)


def on_every_gpu(step: Step, place: Place) -> Record:
    """Climb a rung on each GPU of the cluster at the same time, with fake GPUs on one of each node."""
    from rlhf_stack.accelerator import devices
    from rlhf_stack.certify import on_cluster

    end = time.monotonic() + step.seconds - NAMING_SECONDS
    with on_cluster.nodes_with_gpus(place) as nodes:
        addresses = on_cluster.gpus_of(nodes) if devices.is_gpu() else [node.address for node in nodes]
        with on_cluster.actors(on_cluster.Hand, addresses) as hands:
            calls = [hand.run.remote(attempt, step, place) for hand in hands]
            names = [f"GPU {index} on {address}" for index, address in enumerate(addresses)]
            records = on_cluster.answers(calls, names, end - time.monotonic())
    return combined(step.name, dict(zip(names, records, strict=True)))


def combined(rung: str, records: dict[str, Record]) -> Record:
    """One record for those of several GPUs, by their names: failed if one failed."""
    state = next((s for s in (FAILED, NOT_CLIMBED) if any(r.state == s for r in records.values())), PASSED)
    by_reason: dict[str, list[str]] = {}
    for name, record in records.items():
        if record.state == state != PASSED:
            by_reason.setdefault(record.reason, []).append(name)
    reasons = [
        reason if len(names) == len(records) else f"{', '.join(names)}: {reason}"
        for reason, names in by_reason.items()
    ]
    measured = worst([record.measurements for record in records.values()])
    details = {name: record.details for name, record in records.items()}
    return Record(rung, state, "; ".join(reasons), 0.0, measured, details)


def main() -> None:
    """Climb one rung and write its record: STEP PLACE FILE, the first two as JSON."""
    _, rung, text, file = sys.argv
    step = Step(**json.loads(rung))
    place = Place(**json.loads(text))
    everywhere = step.on == "gpu" and place.address
    record = recorded(step, lambda: on_every_gpu(step, place)) if everywhere else attempt(step, place)
    Path(file).write_text(json.dumps(asdict(record)), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # threads of NCCL and Ray may never end


if __name__ == "__main__":
    main()
