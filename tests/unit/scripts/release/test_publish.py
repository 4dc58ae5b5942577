"""Tags and refusals of publish, without a registry."""

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import docker.errors
import pytest

from scripts.docker.registry import Remote
from scripts.errors import UserError
from scripts.images.inputs import INPUTS, REVISION, image_labels
from scripts.images.source import source_digest
from scripts.matrix.load import expand, load
from scripts.release import catalogue, facts, publish, requirements
from scripts.testing import records

CELL = next(cell for cell in expand(load()) if cell.is_default)
LABELS = {**image_labels(CELL, "base", []), REVISION: "a" * 40, INPUTS: "digest"}
IMAGE, MANIFEST = "sha256:" + "1" * 64, "sha256:" + "2" * 64
THERE = Remote(MANIFEST, IMAGE, (("sha256:" + "a" * 64, 100), ("sha256:" + "b" * 64, 20)))


def image(changed: dict[str, str] | None = None) -> Any:
    """Return an image of the cell."""
    return SimpleNamespace(id=IMAGE, labels=LABELS | (changed or {}))


def test_an_image_of_the_current_inputs_needs_its_records(tmp_path: Path) -> None:
    reasons = publish.refusals(CELL, image(), (tmp_path,))
    assert [reason.partition(": ")[2] for reason in reasons] == [
        f"no record of the suite {suite} on this image: run its tests" for suite in records.required(CELL)
    ]


def test_an_altered_record_is_an_error(tmp_path: Path) -> None:
    folder = records.folder_of(CELL.id, LABELS[INPUTS], tmp_path)
    folder.mkdir(parents=True)
    (folder / "image-1-000000000000.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="not a test record"):
        publish.refusals(CELL, image(), (tmp_path,))


def test_checks_and_a_catalogue_of_these_images_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the commit from which they are published."""
    monkeypatch.setattr(publish, "revision", lambda: "c" * 40)
    monkeypatch.setattr(catalogue, "check", lambda offline: ["page.md does not follow"])
    monkeypatch.setattr(facts, "load", lambda _: {})
    assert publish.untrue([publish.Item(CELL, image())]) == [
        "lint did not pass on cccccccccccc: run python -m scripts suites --checks",
        "unit did not pass on cccccccccccc: run python -m scripts suites --checks",
        "page.md does not follow",
        f"{CELL.id}: the catalogue is about another image: run python -m scripts catalogue, and commit",
    ]


def test_a_cell_that_the_catalogue_calls_not_verified_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its changed sources give the same inputs."""
    known: dict[str, Any] = {CELL.id: SimpleNamespace(image="sha256:1", source="of another commit")}
    [reason] = requirements.catalogued(CELL, "sha256:1", known)
    assert "the catalogue calls it not verified yet" in reason
    known[CELL.id].source = source_digest(CELL)
    assert requirements.catalogued(CELL, "sha256:1", known) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"io.rlhf-stacks.cell": "other"}, "is the tag of another image"),
        ({"io.rlhf-stacks.stand-in": "torch"}, "is a stand-in"),
        ({"org.opencontainers.image.version": "1-x"}, r"was built for another release \(1-x\)"),
        ({REVISION: "abc-dirty"}, "was built from a dirty tree"),
        ({INPUTS: ""}, "was built without a digest of its inputs"),
    ],
)
def test_another_image_is_refused_with_its_reason(
    changed: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "suites", lambda *_: [])
    [reason] = publish.refusals(CELL, image(changed), (Path("absent"),))
    assert reason.startswith(CELL.id)
    assert re.search(message, reason)


def test_an_image_of_other_inputs_is_refused() -> None:
    item = publish.Item(CELL, image())
    assert publish.changed([item], lambda _: LABELS[INPUTS]) == []
    reason = f"{CELL.id} was built from aaaaaaaaaaaa, and its inputs have changed since: build and test it"
    assert publish.changed([item], lambda _: "other") == [reason]


@pytest.mark.parametrize(("collected", "untrue", "laid_out"), [(["x"], [], 0), ([], ["x"], 0), ([], [], 1)])
def test_a_build_is_laid_out_only_if_nothing_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, collected: list[str], untrue: list[str], laid_out: int
) -> None:
    """In a fresh clone that downloads packages and builds root filesystems."""
    lays_out = MagicMock(return_value=["changed"])
    monkeypatch.setattr(publish, "require_clean_tree", lambda: None)
    monkeypatch.setattr(publish, "connect", MagicMock())
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    monkeypatch.setattr(publish, "collect", lambda *_: ([], collected))
    monkeypatch.setattr(publish, "untrue", lambda _: untrue)
    monkeypatch.setattr(publish, "changed", lays_out)
    assert publish.publish_cells("registry.example/x", [CELL]) == 2
    assert lays_out.call_count == laid_out


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


@pytest.mark.parametrize("earlier", ["", IMAGE, "sha256:" + "3" * 64], ids=["none", "the same", "another"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_push_leaves_the_tags_of_this_machine_as_they_were(
    earlier: str, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a tag of the same name that was pulled before, of whichever image."""
    tags = {"h/x:1": earlier} if earlier else {}

    def get(name: str) -> Any:
        if name not in tags:
            raise docker.errors.ImageNotFound(name)
        return tagged(tags[name])

    def tagged(number: str) -> Any:
        def tag(repo: str, tag: str) -> None:
            tags[f"{repo}:{tag}"] = number

        return SimpleNamespace(id=number, tag=tag, attrs={"RootFS": {"Layers": []}})

    def upload(*_: Any) -> Any:
        assert tags["h/x:1"] == IMAGE
        if fails:
            raise UserError("no space")
        return SimpleNamespace(digest=MANIFEST, pushed=[])

    client: Any = SimpleNamespace(
        images=SimpleNamespace(get=get, remove=lambda name, noprune: tags.pop(name)),
    )
    monkeypatch.setattr(publish, "_upload", upload)
    monkeypatch.setattr(publish, "inspect_remote", lambda *_: THERE)
    with pytest.raises(UserError, match="no space") if fails else contextlib.nullcontext():
        assert publish.push(client, tagged(IMAGE), "h/x", "1", MagicMock()).digest == MANIFEST
    assert tags == ({"h/x:1": earlier} if earlier else {})


def test_the_table_has_whole_digests() -> None:
    lines = publish.table([publish.Row("h/x:long", MANIFEST, 1234), publish.Row("h/x:s", MANIFEST, None)])
    assert lines.splitlines() == [f"h/x:long  {MANIFEST}  1,234 bytes", f"h/x:s     {MANIFEST}  existed"]
