"""Certificates of `rlhf-stack certify` on users' GPUs: checked, kept in ``images/certificates/``, shown.

A certificate is believed about an image only if a measurement of an image with these inputs is committed. Its
raw records, with host names and logs, stay with who made it.
"""

import shutil
import subprocess
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from rlhf_stack.certify.certificate import RECORDS
from rlhf_stack.certify.ladder import NAMES
from rlhf_stack.certify.model import (
    FAILED,
    NOT_CLIMBED,
    PASSED,
    SCHEMA,
    Certificate,
    Record,
    digest_of,
    result,
)
from rlhf_stack.known_bad.matching import COLOURS

from scripts.digests import sha256
from scripts.errors import UserError
from scripts.paths import ROOT
from scripts.release import gpu_kit
from scripts.release.facts import all_measurements
from scripts.testing.records import COMMITTED, decode

FOLDER = ROOT / "images" / "certificates"
SCHEMA_FILE = ROOT / "docs" / "certificate.schema.json"
SIGNATURE = ".sig"
NOTE = ".txt"  # of who added it: what a reader must know about the run
MOST_BYTES = 16 << 20
NAMESPACE = "rlhf-stack-certificate"  # of ssh-keygen -Y
DIGITS = 12
REASON = 160  # characters of a reason in the table
TIMES = "\N{MULTIPLICATION SIGN}"
COLUMNS = ("run on", "cell", "passed", "failed", "not climbed", "signed by", "certificate")


def schema() -> str:
    """The JSON schema of certificates and of the records of their rungs."""
    _, components = msgspec.json.schema_components((Certificate, Record), ref_template="#/$defs/{name}")
    found = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": SCHEMA,
        "$ref": "#/$defs/Certificate",
        "$defs": components,
    }
    return msgspec.json.format(msgspec.json.encode(found, order="deterministic"), indent=2).decode() + "\n"


def known_subjects(records: Path = COMMITTED) -> dict[str, str]:
    """The cells by the inputs digest of each measured image, and "" by the digest of this checkout's kit."""
    return _cells(records) | {gpu_kit.digest(gpu_kit.files()): ""}


def unknown(found: Sequence[Certificate], records: Path = COMMITTED) -> list[str]:
    """A line for each certificate of an image that was not measured; older kits cannot be checked."""
    cells = _cells(records)
    return [
        f"{FOLDER.name}/{file_name(one)}: no image of {one.subject.cell} with inputs "
        f"{one.subject.inputs[:DIGITS]} was measured"
        for one in found
        if one.subject.inputs and cells.get(one.subject.inputs) != one.subject.cell
    ]


def _cells(records: Path) -> dict[str, str]:
    """The cells by the inputs digest of each measured image."""
    return {one.inputs: one.cell for one in all_measurements(records)}


def add(file: Path, known: Mapping[str, str], folder: Path = FOLDER, note: str = "") -> Path:
    """Check a certificate, its records and its signature, and copy the first and the last to ``folder``.

    The catalogue shows the ``note`` next to it.
    ``known`` are cells by digests, as `known_subjects` returns them. `UserError` says what is wrong.
    """
    content = read_bytes(file)
    certificate = parse(content, file)
    subject = certificate.subject.inputs or certificate.subject.kit
    if not subject:
        raise UserError(
            f"{file}: it names no inputs digest: certify was not started in an image of the stack"
        )
    if known.get(subject) != certificate.subject.cell:
        raise UserError(
            f"{file}: {certificate.subject.cell or 'a kit'} of inputs {subject[:DIGITS]} is unknown: this "
            "checkout has no measurement of such an image, or another kit"
        )
    check_records(certificate, file.parent / RECORDS)
    signature = file.with_name(file.name + SIGNATURE)
    if signature.exists():
        signed_by(content, signature)
    target = folder / file_name(certificate)
    if target.exists():
        raise UserError(f"{file}: it was added already, as {target.name}")
    folder.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    if signature.exists():
        shutil.copyfile(signature, target.with_name(target.name + SIGNATURE))
    if note:
        target.with_suffix(NOTE).write_text(f"{' '.join(note.split())}\n", encoding="utf-8")
    return target


def read_bytes(file: Path) -> bytes:
    """The content of a file that the user named; `UserError` above `MOST_BYTES`."""
    try:
        if file.exists() and not file.is_file():
            raise UserError(f"{file}: no file, but a folder, pipe or device")
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise UserError(f"{file}: more than {MOST_BYTES >> 20} MiB, which no certificate has")
    return content


def parse(content: bytes, file: Path) -> Certificate:
    """The certificate with this content; `UserError` if it is of another schema, edited or not complete."""
    try:
        raw = decode(content, dict[str, Any])
    except msgspec.DecodeError as error:
        raise UserError(f"{file}: not a certificate: {error}") from None
    if (version := raw.get("schema")) != SCHEMA:
        raise UserError(f"{file}: its schema is {version!r}; this checkout reads {SCHEMA}")
    if raw.get("digest") != digest_of(raw):
        raise UserError(f"{file}: it was edited: its digest is not that of its content")
    try:
        certificate = msgspec.convert(raw, Certificate)
        datetime.fromisoformat(certificate.begun)
    except (msgspec.ValidationError, ValueError) as error:
        raise UserError(f"{file}: not a certificate: {error}") from None
    names = tuple(rung.name for rung in certificate.rungs)
    if missing := [name for name in NAMES if name not in names]:
        raise UserError(f"{file}: it is not complete: no rung {', '.join(missing)}")
    if names != NAMES:
        raise UserError(f"{file}: its rungs are not those of the ladder, in its order: {', '.join(names)}")
    for rung in certificate.rungs:
        if (rung.state == PASSED) == bool(rung.reason):
            raise UserError(
                f"{file}: rung {rung.name} {rung.state} and has {rung.reason or 'no'!r} as reason"
            )
    return certificate


def check_records(certificate: Certificate, folder: Path) -> None:
    """Check the raw record of each rung: its digest, and that it says what the certificate says."""
    for rung in certificate.rungs:
        file = folder / f"{rung.name}.json"
        if not file.is_file():
            raise UserError(f"{file}: no such record: add the certificate in the folder that certify wrote")
        content = file.read_bytes()
        if sha256(content) != rung.record:
            raise UserError(f"{file}: it was edited: its digest is not the one in the certificate")
        try:
            record = decode(content, Record)
        except msgspec.DecodeError as error:
            raise UserError(f"{file}: not a record: {error}") from None
        if replace(result(record, rung.title), record=rung.record) != rung:
            raise UserError(f"{file}: the certificate says something else about rung {rung.name}")


def signed_by(content: bytes, signature: Path) -> str:
    """The fingerprint of the key that signed ``content``; `UserError` if the signature is invalid."""
    try:
        done = subprocess.run(
            ["ssh-keygen", "-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(signature)],
            input=content,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(f"{signature}: ssh-keygen, which checks it, is not installed") from None
    words = done.stdout.decode(errors="replace").split()
    if done.returncode or not words:
        raise UserError(f"{signature}: it is no valid signature of the certificate for {NAMESPACE}")
    return words[-1]


def file_name(certificate: Certificate) -> str:
    """The name of a committed certificate: the day on which it was begun, and its digest."""
    return f"{certificate.begun[:10]}-{certificate.digest[:DIGITS]}.json"


def load(folder: Path = FOLDER) -> list[Certificate]:
    """The committed certificates, the newest first; `UserError` if one was edited or renamed."""
    found = {file: parse(file.read_bytes(), file) for file in folder.glob("*.json")}
    for file, certificate in found.items():
        if file.name != file_name(certificate):
            raise UserError(f"{file}: it was renamed: rename it to {file_name(certificate)}")
    return sorted(found.values(), key=lambda certificate: certificate.begun, reverse=True)


def machines_in_words(certificate: Certificate) -> str:
    """What it ran on, such as 8 of a model, its driver, and the date."""
    date = certificate.begun[:10]
    groups: dict[tuple[Any, ...], int] = {}
    for machine in certificate.machines:
        key = (machine.gpus, machine.model, machine.driver, machine.fake_gpus)
        groups[key] = groups.get(key, 0) + 1
    parts = []
    for (gpus, model, driver, fake), nodes in groups.items():
        times = f"{nodes} {TIMES} " if nodes > 1 else ""
        if gpus:
            parts.append(f"{times}{gpus} {TIMES} {model or 'GPU'}{f', driver {driver}' if driver else ''}")
        else:
            parts.append(f"{times}CPU{f' with {fake} fake GPUs' if fake else ''}")
    return f"{'; '.join(parts) or 'nothing'}, {date}"


def rows(found: Sequence[Certificate], folder: Path = FOLDER) -> list[tuple[str, ...]]:
    """The rows of the catalogue's table, in the order of `COLUMNS`."""
    return [row(certificate, folder) for certificate in found]


def row(certificate: Certificate, folder: Path) -> tuple[str, ...]:
    """One row: names of rungs that passed, and why the others did not; long reasons are cut."""
    by_state: dict[str, list[str]] = {PASSED: [], FAILED: [], NOT_CLIMBED: []}
    for rung in certificate.rungs:
        reason = textwrap.shorten(COLOURS.sub("", rung.reason), REASON, placeholder=" …")
        by_state[rung.state].append(f"{rung.name}: {reason}" if reason else rung.name)
    file = folder / file_name(certificate)
    signature = file.with_name(file.name + SIGNATURE)
    note = file.with_suffix(NOTE)
    about = f": {note.read_text(encoding='utf-8').strip()}" if note.exists() else ""
    signed = signed_by(file.read_bytes(), signature) if signature.exists() else "not signed"
    cell = f"`{certificate.subject.cell}`" if certificate.subject.cell else "no image: torch alone"
    columns = (", ".join(by_state[PASSED]), *("; ".join(by_state[state]) for state in (FAILED, NOT_CLIMBED)))
    return (
        machines_in_words(certificate),
        cell,
        *(text or "none" for text in columns),
        signed,
        f"[`{file.stem.rpartition('-')[2]}`](certificates/{file.name}){about}",
    )


def of_cell(found: Sequence[Certificate], cell: str, inputs: str) -> str:
    """On which GPUs the image of ``cell`` with these ``inputs`` was certified last; "" if on none."""
    for certificate in found:
        is_real = any(machine.gpus for machine in certificate.machines)
        passed = sum(rung.state == PASSED for rung in certificate.rungs)
        if is_real and passed and (certificate.subject.cell, certificate.subject.inputs) == (cell, inputs):
            return f"run on {machines_in_words(certificate)}: {passed} of {len(NAMES)} rungs passed"
    return ""
