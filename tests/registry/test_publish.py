"""Publishing to a real registry: what gets there, what is refused, and what an interruption leaves."""

import base64
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import docker
import docker.errors
import msgspec
import pytest
from docker.models.images import Image
from rich.console import Console

from scripts.docker.registry import inspect_remote
from scripts.errors import UserError
from scripts.images.inputs import INPUTS, digest_for
from scripts.matrix.load import Cell
from scripts.paths import ROOT
from scripts.release import publish
from scripts.release.publish import Item
from scripts.testing import records
from tests.registry import server
from tests.registry.images import GIVEN, LAYER_BYTES, Make, remove

CONSOLE = Console(quiet=True)
USER = "tester:secret"
HTPASSWD = "tester:$2b$04$uu.5G.b1dA4piEdKQaUZ.ePzrtJNzJKu11CeDD3puhJ6dRkCh/XXa\n"  # of USER, in bcrypt
NOBODY = "127.0.0.1:1/tests/nobody"


def gathered(client: docker.DockerClient, repo: str, item: Item, kept: Path) -> list[str]:
    """Why the item is refused; empty if it is not."""
    items, reasons = publish.collect(client, repo, [item.cell], kept, lambda _: GIVEN)
    assert [found.image.id for found in items] == [item.image.id]
    return reasons


def test_a_tested_image_is_pushed_and_can_be_pulled_by_its_digest(
    client: docker.DockerClient, registry: server.Registry, repo: str, make: Make, kept: Path
) -> None:
    """Deleted here, so that every byte of it has to come from the registry."""
    item = make()
    assert gathered(client, repo, item, kept) == []
    immutable, alias = publish.publish(client, repo, [item], CONSOLE)
    assert immutable.reference == f"{repo}:{item.cell.release}-{item.cell.id}"
    assert alias.reference == f"{repo}:{item.cell.id}"
    assert immutable.digest == alias.digest
    assert immutable.moved is not None
    assert immutable.moved >= LAYER_BYTES
    assert alias.moved == 0, "the registry had the layers"
    assert item.image.tags == [item.cell.tag], "no name of the registry stays here"

    remove(client, str(item.image.id))
    with pytest.raises(docker.errors.ImageNotFound):
        client.images.get(str(item.image.id))
    before = set(registry.served())
    pulled = client.images.pull(repo, tag=immutable.digest)
    assert pulled.id == item.image.id
    fetched = registry.served()
    assert sum(fetched[blob] for blob in set(fetched) - before) >= LAYER_BYTES


def test_published_again_nothing_moves(
    client: docker.DockerClient, repo: str, make: Make, kept: Path
) -> None:
    """The end is the same, and is shown again."""
    item = make()
    first = publish.publish(client, repo, [item], CONSOLE)
    assert gathered(client, repo, item, kept) == []
    second = publish.publish(client, repo, [item], CONSOLE)
    assert [row.digest for row in second] == [row.digest for row in first]
    assert [row.moved for row in second] == [None, None]


def test_an_immutable_tag_is_not_overwritten(
    client: docker.DockerClient, repo: str, make: Make, kept: Path
) -> None:
    """Neither when checked nor by a push that raced another; what is there stays."""
    first, other = make(), make()
    digest = publish.publish(client, repo, [first], CONSOLE)[0].digest
    [reason] = gathered(client, repo, other, kept)
    assert (
        f"{repo}:{other.immutable} exists with other content ({digest}) and is immutable" in reason
    )
    with pytest.raises(UserError, match="it is immutable"):
        publish.publish(client, repo, [other], CONSOLE)
    there = inspect_remote(client, f"{repo}:{other.cell.id}")
    assert there is not None
    assert there.holds(str(first.image.id))


def test_a_new_release_moves_the_alias_alone(client: docker.DockerClient, repo: str, make: Make) -> None:
    """The former release stays under its tag."""
    old, new = make(), make(release="2999.1")
    before = publish.publish(client, repo, [old], CONSOLE)[0]
    _, alias = publish.publish(client, repo, [new], CONSOLE)
    assert alias.digest != before.digest
    stays = inspect_remote(client, before.reference)
    assert stays is not None
    assert stays.digest == before.digest


def test_interrupted_it_is_run_again(
    client: docker.DockerClient, repo: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No alias and no local name is left half-way; the second run ends where the first would have."""
    item = make()

    class Interrupted(publish.Upload):
        def take(self, event: Mapping[str, Any]) -> None:
            super().take(event)
            if event.get("status") == "Pushing":
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(publish, "Upload", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            publish.publish(client, repo, [item], CONSOLE)
    assert inspect_remote(client, f"{repo}:{item.cell.id}") is None
    assert client.images.get(item.cell.tag).tags == [item.cell.tag]

    immutable, alias = publish.publish(client, repo, [item], CONSOLE)
    assert immutable.digest == alias.digest
    there = inspect_remote(client, alias.reference)
    assert there is not None
    assert there.holds(str(item.image.id))


def test_interrupted_between_the_tags_the_alias_follows(
    client: docker.DockerClient, repo: str, make: Make
) -> None:
    """The immutable tag is there; what is missing is pushed."""
    item = make()
    first = publish.push(client, item.image, repo, item.immutable, CONSOLE)
    immutable, alias = publish.publish(client, repo, [item], CONSOLE)
    assert (immutable.digest, immutable.moved) == (first.digest, None)
    assert (alias.digest, alias.moved) == (first.digest, 0)


def test_a_stand_in_is_refused(client: docker.DockerClient, repo: str, make: Make, kept: Path) -> None:
    [reason] = gathered(client, repo, make(stand_in="torch"), kept)
    assert "is a stand-in for tests" in reason


def test_an_image_of_other_inputs_is_refused(
    client: docker.DockerClient, repo: str, make: Make, kept: Path
) -> None:
    [dirty] = gathered(client, repo, make(revision="abc-dirty"), kept)
    assert "was built from a dirty tree" in dirty
    [other] = gathered(client, repo, make(inputs="other"), kept)
    assert "was built from abc, and its inputs have changed since" in other


def test_the_image_of_a_cell_is_what_a_build_of_it_is_given(image: Image, cell: Cell) -> None:
    """As publish asks; that it was built stands before every test here."""
    assert image.labels[INPUTS] == digest_for(cell)


def test_without_a_passed_record_it_is_refused(
    client: docker.DockerClient, repo: str, make: Make, kept: Path
) -> None:
    item = make()
    image = str(item.image.id)
    record = records.read(image, kept)["image"]
    records.write(msgspec.structs.replace(record, outcome="failed"), kept)
    (records.folder_of(image, kept) / "layers.json").unlink()
    assert gathered(client, repo, item, kept) == [
        f"{item.cell.id}: the suite image failed: run its tests",
        f"{item.cell.id}: no record of the suite layers: run its tests",
    ]


def test_a_cell_that_is_not_built_is_told(client: docker.DockerClient, repo: str, make: Make) -> None:
    absent = msgspec.structs.replace(make().cell, tag="rlhf-stacks-tests:absent")
    assert publish.collect(client, repo, [absent]) == ([], ["rlhf-stacks-tests:absent is not built"])


def test_a_registry_that_is_not_there_is_told_in_a_line(
    client: docker.DockerClient, make: Make, kept: Path
) -> None:
    """By the check before, and by the push itself."""
    item = make()
    for attempt in (
        lambda: publish.collect(client, NOBODY, [item.cell], kept, lambda _: GIVEN),
        lambda: publish.push(client, item.image, NOBODY, item.immutable, CONSOLE),
    ):
        with pytest.raises(UserError, match=r"the registry 127\.0\.0\.1:1 cannot be reached") as told:
            attempt()
        assert "\n" not in str(told.value)
    assert item.image.tags == [item.cell.tag]


@pytest.fixture
def guarded() -> Any:
    """A registry that asks for a user."""
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="registry-") as folder,
        server.running(Path(folder), HTPASSWD) as running,
    ):
        yield running


def test_who_is_not_logged_in_is_told_to(
    client: docker.DockerClient,
    guarded: server.Registry,
    make: Make,
    kept: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And who is, by Docker's own configuration, pushes."""
    item, repo = make(), f"{guarded.host}/tests/guarded"
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    for attempt in (
        lambda: publish.collect(client, repo, [item.cell], kept, lambda _: GIVEN),
        lambda: publish.push(client, item.image, repo, item.immutable, CONSOLE),
    ):
        with pytest.raises(UserError, match=f"run `docker login {guarded.host}`") as told:
            attempt()
        assert "\n" not in str(told.value)
    login = {"auths": {guarded.host: {"auth": base64.b64encode(USER.encode()).decode()}}}
    (tmp_path / "config.json").write_text(json.dumps(login), encoding="utf-8")
    knows = docker.from_env(timeout=publish.PUSH_SECONDS)
    assert gathered(knows, repo, item, kept) == []
    assert publish.publish(knows, repo, [item], CONSOLE)[0].moved
