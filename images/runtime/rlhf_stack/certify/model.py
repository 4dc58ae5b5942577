"""A certificate and the records of its rungs, as JSON; digests by which an edit is detected.

``python -m scripts certificates schema`` writes the JSON schema of these classes to
``docs/certificate.schema.json``.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA = "rlhf-stack/certificate/1"
RECORD_SCHEMA = "rlhf-stack/certificate-record/1"
PASSED: Literal["passed"] = "passed"
FAILED: Literal["failed"] = "failed"
NOT_CLIMBED: Literal["not climbed"] = "not climbed"
State = Literal["passed", "failed", "not climbed"]
LOWER_IS_WORSE = ("GB/s", "tokens/s")


@dataclass(frozen=True)
class Measurement:
    """A number that a rung measured, with its unit ("" for a count or a relative error)."""

    name: str
    value: float
    unit: str = ""


@dataclass(frozen=True)
class Rung:
    """The result of a rung; ``record`` is the sha256 of its file ``records/<name>.json``.

    ``reason`` says why it failed or was not climbed, and is "" for one that passed.
    """

    name: str
    title: str
    state: State
    reason: str
    seconds: float
    measurements: list[Measurement]
    record: str


@dataclass(frozen=True)
class Subject:
    """What was certified: an image by its cell, release and inputs digest, or a kit by its digest alone."""

    cell: str
    release: str
    inputs: str
    kit: str = ""


@dataclass(frozen=True)
class Machine:
    """A node: its GPUs, their model and driver, and its fastest RDMA adapter in Gbit/s.

    ``fake_gpus`` are those that Ray was given on a machine without a GPU.
    """

    gpus: int
    model: str = ""
    driver: str = ""
    rdma: float = 0.0
    fake_gpus: int = 0


@dataclass(frozen=True)
class Certificate:
    """The result of all rungs of the ladder, in order, on ``machines``; ``begun`` is in UTC.

    ``digest`` is the sha256 of the JSON of all other fields, with sorted keys and without spaces.
    """

    schema: str
    begun: str
    seconds: float
    subject: Subject
    machines: list[Machine]
    rungs: list[Rung]
    digest: str = ""

    def sealed(self) -> dict[str, Any]:
        """The certificate as JSON values, with its digest."""
        content = asdict(self)
        return content | {"digest": digest_of(content)}


@dataclass(frozen=True)
class Record:
    """The raw record of a rung: its result, what it measured in ``details``, and the end of its output."""

    rung: str
    state: State
    reason: str
    seconds: float
    measurements: list[Measurement] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    log: str = ""
    schema: str = RECORD_SCHEMA

    def encoded(self) -> bytes:
        """The content of the record's file."""
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode() + b"\n"


def digest_of(content: Mapping[str, Any]) -> str:
    """The digest of a certificate's JSON values, whatever its field ``digest`` is."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def result(record: Record, title: str) -> Rung:
    """The entry of a certificate for a record."""
    digest = hashlib.sha256(record.encoded()).hexdigest()
    return Rung(record.rung, title, record.state, record.reason, record.seconds, record.measurements, digest)


def worst(measured: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    """Of the same measurements on several GPUs the worst of each: the lowest rate, otherwise the highest."""
    found: dict[str, Measurement] = {}
    for one in (each for several in measured for each in several):
        known = found.setdefault(one.name, one)
        if (one.value < known.value) == (one.unit in LOWER_IS_WORSE):
            found[one.name] = one
    return list(found.values())
