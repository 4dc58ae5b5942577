"""Writes a certificate and the records of its rungs to a folder."""

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rlhf_stack.certify.climb import Report, climb
from rlhf_stack.certify.ladder import LADDER, Place, Step
from rlhf_stack.certify.model import SCHEMA, Certificate, Machine, Record, Subject, result

FILE, RECORDS = "certificate.json", "records"
SHOWN = 3  # measurements of a rung in the table


def certify(
    place: Place,
    chosen: Sequence[str],
    subject: Subject,
    machines: "list[Machine] | None",
    folder: Path,
    report: Report,
) -> Certificate:
    """Climb the ladder and write the certificate; ``machines`` are those of the facts if they are None."""
    from rlhf_stack.certify.facts import machines as from_facts

    begun, start = datetime.now(UTC), time.monotonic()
    titles = {step.name: step.title for step in LADDER}
    (folder / RECORDS).mkdir(parents=True, exist_ok=True)
    rungs = []
    for record in climb(place, chosen, report):
        (folder / RECORDS / f"{record.rung}.json").write_bytes(record.encoded())
        rungs.append(result(record, titles[record.rung]))
        if record.rung == "facts" and machines is None:
            machines = from_facts(list(record.details.values()))
    certificate = Certificate(
        SCHEMA,
        begun.strftime("%Y-%m-%dT%H:%M:%SZ"),
        round(time.monotonic() - start, 1),
        subject,
        machines or [],
        rungs,
    )
    text = json.dumps(certificate.sealed(), indent=1)
    (folder / FILE).write_text(f"{text}\n", encoding="utf-8")
    return certificate


def line(step: Step, record: Record | None) -> str:
    """One line about a rung that begins, or its result and why it failed or what it measured first."""
    if record is None:
        return f"{step.name}: {step.title} (at most {step.seconds:.0f} s)"
    measured = ", ".join(
        f"{one.name} {one.value:.3g} {one.unit}".rstrip() for one in record.measurements[:SHOWN]
    )
    return f"{record.rung:<16}{record.state:<12}{record.seconds:>6.0f} s  {record.reason or measured}"
