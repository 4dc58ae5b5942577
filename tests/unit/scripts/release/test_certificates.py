"""A certificate is added only if it is complete, unedited, about a known image, and its records are there."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rlhf_stack.certify.ladder import LADDER
from rlhf_stack.certify.model import (
    FAILED,
    NOT_CLIMBED,
    PASSED,
    SCHEMA,
    Certificate,
    Machine,
    Measurement,
    Record,
    State,
    Subject,
    digest_of,
    result,
)

from scripts.errors import UserError
from scripts.matrix.load import expand, expand_all, load
from scripts.release import certificates, render

INPUTS, CELL = "1" * 64, "ray2.55.0-vllm0.29.0-cuda13.0"
KNOWN = {INPUTS: CELL, "2" * 64: ""}
H100 = Machine(8, "NVIDIA H100 80GB HBM3", "580.95.05", 400.0)


def made(folder: Path, subject: Subject | None = None, machines: tuple[Machine, ...] = (H100, H100)) -> Path:
    """Write a certificate, one of whose rungs failed and one was not climbed, as certify does."""
    (folder / "records").mkdir(parents=True)
    rungs = []
    for step in LADDER:
        other: dict[str, State] = {"sleep": FAILED, "streams": NOT_CLIMBED}
        state = other.get(step.name, PASSED)
        reason = "" if state == PASSED else f"why {step.name} did not"
        measured = [Measurement("rate", 2.0, "GB/s"), Measurement("nodes", 2)]
        record = Record(step.name, state, reason, 1.5, measured, {"raw": 1})
        (folder / "records" / f"{step.name}.json").write_bytes(record.encoded())
        rungs.append(result(record, step.title))
    found = Certificate(
        SCHEMA, "2026-11-24T10:00:00Z", 99.0, subject or Subject(CELL, "1.0", INPUTS), list(machines), rungs
    )
    file = folder / "certificate.json"
    file.write_text(json.dumps(found.sealed(), indent=1))
    return file


def changed(file: Path, change: Callable[[dict[str, Any]], object], seal: bool = True) -> Path:
    """Change a certificate, and unless it is to be noticed as an edit, its digest too."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content | ({"digest": digest_of(content)} if seal else {})))
    return file


def test_a_good_one_is_added_once_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept"
    file = made(tmp_path / "made")
    added = certificates.add(file, KNOWN, kept)
    assert added.read_bytes() == file.read_bytes()
    with pytest.raises(UserError, match="added already"):
        certificates.add(file, KNOWN, kept)
    monkeypatch.setattr(certificates, "FOLDER", kept)
    monkeypatch.setattr(certificates.load, "__defaults__", (kept,))
    monkeypatch.setattr(certificates.rows, "__defaults__", (kept,))
    (found,) = certificates.load()
    row = certificates.rows([found])[0]
    times = certificates.TIMES
    assert row[0] == f"2 {times} 8 {times} NVIDIA H100 80GB HBM3, driver 580.95.05, 2026-11-24"
    assert row[1:2] + row[3:6] == (
        f"`{CELL}`",
        "sleep: why sleep did not",
        "streams: why streams did not",
        "not signed",
    )
    page = render.page(expand(load()), {})
    assert added.name in page
    assert "driver 580.95.05" in page
    assert certificates.of_cell([found], CELL, INPUTS).endswith(f"12 of {len(LADDER)} rungs passed")
    assert certificates.of_cell([found], CELL, "3" * 64) == ""


@pytest.mark.parametrize(
    ("change", "seal", "reason"),
    [
        (lambda content: content["rungs"][0].update(seconds=0.1), False, "was edited"),
        (
            lambda content: content["rungs"][0].update(seconds=0.1),
            True,
            "says something else about rung facts",
        ),
        (lambda content: content["rungs"][1].update(record="0" * 64), True, "attention.json: it was edited"),
        (lambda content: content["rungs"].pop(3), True, "not complete: no rung network"),
        (lambda content: content["rungs"].reverse(), True, "not those of the ladder, in its order"),
        (lambda content: content["rungs"][0].update(reason="but"), True, "rung facts passed"),
        (
            lambda content: content["rungs"][0].update(state="excellent"),
            True,
            "not a certificate: .*excellent",
        ),
        (lambda content: content.update(schema="rlhf-stack/certificate/2"), True, "its schema is .*/2"),
        (lambda content: content.update(begun="yesterday"), True, "not a certificate: .*yesterday"),
        (
            lambda content: content["subject"].update(inputs="9" * 64),
            True,
            "of inputs 999999999999 is unknown",
        ),
        (lambda content: content["subject"].update(cell="another"), True, "another of inputs .* is unknown"),
        (lambda content: content["subject"].update(inputs=""), True, "names no inputs digest"),
    ],
)
def test_a_bad_one_is_refused_with_its_reason(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], seal: bool, reason: str
) -> None:
    file = changed(made(tmp_path / "made"), change, seal)
    with pytest.raises(UserError, match=reason) as refused:
        certificates.add(file, KNOWN, tmp_path / "kept")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "kept").exists()


def test_files_that_are_no_certificate(tmp_path: Path) -> None:
    for content, reason in (
        (b"{", "not a certificate"),
        (b"[]", "not a certificate"),
        (b"\xff", "not a certif"),
        (b'{"cell": "\xff"}', "not a certif"),
    ):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(UserError, match=reason):
            certificates.add(tmp_path / "file", KNOWN, tmp_path / "kept")
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(certificates.MOST_BYTES + 1)
    refused = {
        "absent": "No such file",
        "large": "more than 16 MiB",
        "pipe": "no file, but",
        "": "no file, but",
    }
    for file, reason in ((tmp_path / name, reason) for name, reason in refused.items()):
        with pytest.raises(UserError, match=reason):
            certificates.add(file, KNOWN, tmp_path / "kept")


def test_a_record_that_is_missing_or_edited(tmp_path: Path) -> None:
    file = made(tmp_path / "made")
    record = file.parent / "records" / "sync.json"
    original = record.read_bytes()
    record.unlink()
    with pytest.raises(UserError, match=r"sync\.json: no such record"):
        certificates.add(file, KNOWN, tmp_path / "kept")
    for content, reason in (
        (original.replace(b"2.0", b"200.0"), "edited"),
        (original + b"\n", "edited"),
        (b"{}", "not"),
    ):
        record.write_bytes(content)
        with pytest.raises(UserError, match=reason):
            certificates.add(file, KNOWN, tmp_path / "kept")


def test_a_signature_is_checked_and_its_key_shown(tmp_path: Path) -> None:
    kept, file, key = tmp_path / "kept", made(tmp_path / "made"), tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    sign = ["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", certificates.NAMESPACE, str(file)]
    subprocess.run(sign, check=True, capture_output=True)
    added = certificates.add(file, KNOWN, kept)
    shown = certificates.rows(certificates.load(kept), kept)[0][5]
    listing = subprocess.run(["ssh-keygen", "-l", "-f", str(key)], check=True, capture_output=True, text=True)
    assert shown == listing.stdout.split()[1]
    added.unlink()
    changed(file, lambda content: content.update(seconds=1.0))
    with pytest.raises(UserError, match="no valid signature"):
        certificates.add(file, KNOWN, kept)


def test_a_kit_is_known_by_its_digest(tmp_path: Path) -> None:
    file = made(tmp_path / "made", Subject("", "", "", "2" * 64), (Machine(1, "NVIDIA H200"),))
    certificates.add(file, KNOWN, tmp_path / "kept", "run in\n a chroot\n")
    (row,) = certificates.rows(certificates.load(tmp_path / "kept"), tmp_path / "kept")
    assert row[0] == f"1 {certificates.TIMES} NVIDIA H200, 2026-11-24"
    assert row[1] == "no image: torch alone"
    assert row[6].endswith(".json): run in a chroot")
    other = made(tmp_path / "other", Subject("", "", "", "3" * 64))
    with pytest.raises(UserError, match="a kit of inputs 333333333333 is unknown"):
        certificates.add(other, KNOWN, tmp_path / "kept")


def test_a_long_reason_is_cut_and_its_colours_removed(tmp_path: Path) -> None:
    long = f"RuntimeError: \x1b[36mray::engine\x1b[39m {'gave up ' * 50}"
    found = msgspec.json.decode(made(tmp_path / "made").read_bytes(), type=Certificate)
    rungs = [replace(rung, reason=long) if rung.reason else rung for rung in found.rungs]
    failed = certificates.row(replace(found, rungs=rungs), tmp_path)[3]
    assert failed.startswith("sleep: RuntimeError: ray::engine gave up")
    assert failed.endswith("gave …")
    assert len(failed) < len(long)


def test_a_renamed_one_is_an_error(tmp_path: Path) -> None:
    """The check for removed files goes by their names."""
    added = certificates.add(made(tmp_path / "made"), KNOWN, tmp_path / "kept")
    renamed = added.rename(added.with_name(f"2026-11-25{added.name[10:]}"))
    with pytest.raises(UserError, match=rf"{renamed.name}: .* rename it to {added.name}"):
        certificates.load(tmp_path / "kept")


def test_one_of_an_image_that_nobody_measured_is_reported(tmp_path: Path) -> None:
    """`add` refuses it, but a commit can bring it."""
    certificates.add(made(tmp_path / "made"), KNOWN, tmp_path / "kept")
    found = certificates.load(tmp_path / "kept")
    [line] = certificates.unknown(found, tmp_path)
    assert line.endswith("was measured")
    assert certificates.unknown(certificates.load()) == []


def test_a_damaged_measurement_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cell" / "inputs" / "measured" / "a.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(b'{"cell": "')
    with pytest.raises(UserError, match=r"a\.json: not a measurement .*: restore it"):
        certificates.known_subjects(tmp_path)


def test_committed_measurements_are_known_with_their_cells(tmp_path: Path) -> None:
    known = certificates.known_subjects()
    assert "" in known.values()
    assert set(known.values()) - {""} <= {cell.id for cell in expand_all(load())}
    assert list(certificates.known_subjects(tmp_path).values()) == [""]


def test_the_schema_has_every_field(tmp_path: Path) -> None:
    schema = json.loads(certificates.SCHEMA_FILE.read_text())
    content = json.loads(made(tmp_path / "made").read_text())
    assert set(schema["$defs"]["Certificate"]["properties"]) == set(content)
    assert set(schema["$defs"]["Rung"]["properties"]) == set(content["rungs"][0])
    assert schema["$defs"]["Rung"]["properties"]["state"]["enum"] == sorted((PASSED, FAILED, NOT_CLIMBED))
