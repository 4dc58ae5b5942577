"""Tags and refusals of publish, without a registry."""

import pytest

from scripts.docker.registry import Remote
from scripts.errors import UserError
from scripts.images.inputs import INPUTS, REVISION, image_labels
from scripts.matrix.load import Cell, expand, load
from scripts.release import publish
from scripts.testing import records

CELL = next(cell for cell in expand(load()) if cell.is_default)
LABELS = {**image_labels(CELL, "base", []), REVISION: "a" * 40, INPUTS: "digest"}
IMAGE, MANIFEST = "sha256:" + "1" * 64, "sha256:" + "2" * 64
THERE = Remote(MANIFEST, IMAGE, (("sha256:" + "a" * 64, 100), ("sha256:" + "b" * 64, 20)))


def digest_for(cell: Cell) -> str:
    """Return the digest of the image's label."""
    assert cell is CELL
    return "digest"


def test_an_image_of_the_current_inputs_with_all_records_is_published() -> None:
    """From any commit: the catalogue is generated from images, so it is committed after them."""
    assert publish.refusals(CELL, LABELS, passed("abc"), digest_for) == []


def passed(revision: str) -> dict[str, records.Record]:
    """Every record that the cell needs."""
    made = {}
    for suite in records.required(CELL):
        made[suite] = records.Record(
            cell=CELL.id,
            image=IMAGE,
            suite=suite,
            outcome="passed",
            passed=1,
            failed=0,
            skipped=0,
            seconds=1.0,
            revision=revision,
            when=records.now(),
        )
    return made


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"io.rlhf-stacks.cell": "other"}, "is the tag of another image"),
        ({"io.rlhf-stacks.stand-in": "torch"}, "is a stand-in"),
        ({"org.opencontainers.image.version": "1-x"}, r"was built for another release \(1-x\)"),
        ({REVISION: "abc-dirty"}, "was built from a dirty tree"),
        ({INPUTS: "other"}, "was built from aaaaaaaaaaaa, and its inputs have changed"),
        (
            {REVISION: "", INPUTS: ""},
            "was built from no commit, and its inputs have changed",
        ),
    ],
)
def test_another_image_is_refused_with_its_reason(changed: dict[str, str], message: str) -> None:
    [reason] = publish.refusals(CELL, LABELS | changed, passed("abc"), digest_for)
    assert reason.startswith(CELL.id)
    with pytest.raises(UserError, match=message):
        raise UserError(reason)


def test_every_missing_record_is_a_line() -> None:
    assert len(publish.refusals(CELL, LABELS, {}, digest_for)) == len(records.required(CELL))


def test_the_same_content_is_not_an_overwrite() -> None:
    """Docker identifies an image by its configuration, newer releases by its manifest."""
    for image in (IMAGE, MANIFEST):
        assert publish.overwrites("h/x:1", THERE, image) == []
    assert publish.overwrites("h/x:1", None, IMAGE) == []
    [reason] = publish.overwrites("h/x:1", THERE, "sha256:" + "3" * 64)
    assert "is immutable" in reason


def test_the_bytes_of_a_push_are_those_of_the_layers_that_were_missing() -> None:
    """Old releases of Docker identify a layer by its content, new ones by the packed blob."""
    diffs = ["sha256:" + "c" * 64, "sha256:" + "d" * 64]
    assert publish.moved(["c" * 12], diffs, THERE) == 100
    assert publish.moved(["b" * 12, "b" * 12], diffs, THERE) == 20
    assert publish.moved([], diffs, THERE) == 0


def test_an_upload_counts_what_is_sent_and_ends_with_its_digest() -> None:
    upload = publish.Upload()
    for event in (
        {"status": "The push refers to repository [h/x]"},
        {"status": "Pushing", "id": "a", "progressDetail": {"current": 5, "total": 10}},
        {"status": "Pushing", "id": "b", "progressDetail": {"current": 30, "total": 20}},
        {"status": "Layer already exists", "id": "c", "progressDetail": {}},
    ):
        upload.take(event)
    assert upload.progress == (25, 30)
    upload.take({"status": "Pushed", "id": "a", "progressDetail": {}})
    upload.take({"progressDetail": {}, "aux": {"Tag": "t", "Digest": MANIFEST, "Size": 5}})
    assert upload.progress == (30, 30)
    assert (upload.pushed, upload.digest) == (["a"], MANIFEST)
    with pytest.raises(UserError, match="no basic auth"):
        upload.take({"error": "no basic auth credentials", "errorDetail": {}})


def test_the_table_has_whole_digests() -> None:
    lines = publish.table([publish.Row("h/x:long", MANIFEST, 1234), publish.Row("h/x:s", MANIFEST, None)])
    assert lines.splitlines() == [f"h/x:long  {MANIFEST}  1,234 bytes", f"h/x:s     {MANIFEST}  existed"]
