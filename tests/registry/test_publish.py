"""Publishing to a real registry: what is pushed, what is refused, and what an interruption leaves."""

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
from tests.registry.images import INPUTS_DIGEST, LAYER_BYTES, Make, remove

CONSOLE = Console(quiet=True)
USER = "tester:secret"
HTPASSWD = "tester:$2b$04$uu.5G.b1dA4piEdKQaUZ.ePzrtJNzJKu11CeDD3puhJ6dRkCh/XXa\n"  # of USER, in bcrypt
UNREACHABLE = "127.0.0.1:1/tests/unreachable"


def gathered(client: docker.DockerClient, repo: str, item: Item, records_folder: Path) -> list[str]:
    """Return why the item is refused; empty if it is accepted."""
    items, reasons = publish.collect(client, repo, [item.cell], (records_folder,))
    assert [found.image.id for found in items] == [item.image.id]
    return reasons or publish.changed(items, lambda _: INPUTS_DIGEST)


def test_a_tested_image_is_pushed_and_pulled_by_its_digest(
    client: docker.DockerClient, registry: server.Registry, repo: str, make: Make, records_folder: Path
) -> None:
    """The local image is deleted, so that every byte comes from the registry."""
    item = make()
    assert gathered(client, repo, item, records_folder) == []
    immutable, alias = publish.publish(client, repo, [item], CONSOLE)
    assert immutable.reference == f"{repo}:{item.cell.release}-{item.cell.id}"
    assert alias.reference == f"{repo}:{item.cell.id}"
    assert immutable.digest == alias.digest
    assert immutable.moved is not None
    assert immutable.moved >= LAYER_BYTES
    assert alias.moved == 0, "the registry had the layers"
    assert item.image.tags == [item.cell.tag], "no local name of the registry remains"

    remove(client, str(item.image.id))
    with pytest.raises(docker.errors.ImageNotFound):
        client.images.get(str(item.image.id))
    before = set(registry.served())
    pulled = client.images.pull(repo, tag=immutable.digest)
    assert pulled.id == item.image.id
    fetched = registry.served()
    assert sum(fetched[blob] for blob in set(fetched) - before) >= LAYER_BYTES


def test_publishing_twice_transfers_nothing(
    client: docker.DockerClient, repo: str, make: Make, records_folder: Path
) -> None:
    """The result is the same, and is shown again."""
    item = make()
    first = publish.publish(client, repo, [item], CONSOLE)
    assert gathered(client, repo, item, records_folder) == []
    second = publish.publish(client, repo, [item], CONSOLE)
    assert [row.digest for row in second] == [row.digest for row in first]
    assert [row.moved for row in second] == [None, None]


def test_an_immutable_tag_is_not_overwritten(
    client: docker.DockerClient, repo: str, make: Make, records_folder: Path
) -> None:
    """Neither the check nor a push that races another one overwrites it; the published image stays."""
    first, other = make(), make()
    digest = publish.publish(client, repo, [first], CONSOLE)[0].digest
    [reason] = gathered(client, repo, other, records_folder)
    assert f"{repo}:{other.immutable} exists with other content ({digest}) and is immutable" in reason
    with pytest.raises(UserError, match="and is immutable"):
        publish.publish(client, repo, [other], CONSOLE)
    remote = inspect_remote(client, f"{repo}:{other.cell.id}")
    assert remote is not None
    assert remote.holds(str(first.image.id))


def test_a_new_release_moves_the_alias_alone(client: docker.DockerClient, repo: str, make: Make) -> None:
    """The previous release keeps its tag."""
    old, new = make(), make(release="2999.1")
    before = publish.publish(client, repo, [old], CONSOLE)[0]
    _, alias = publish.publish(client, repo, [new], CONSOLE)
    assert alias.digest != before.digest
    previous = inspect_remote(client, before.reference)
    assert previous is not None
    assert previous.digest == before.digest


def test_an_interrupted_publication_can_be_repeated(
    client: docker.DockerClient, repo: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No alias or local name is left; the second run has the result of an uninterrupted one."""
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
    remote = inspect_remote(client, alias.reference)
    assert remote is not None
    assert remote.holds(str(item.image.id))


def test_a_publication_interrupted_between_its_tags_adds_the_alias(
    client: docker.DockerClient, repo: str, make: Make
) -> None:
    """The immutable tag exists; only the missing one is pushed."""
    item = make()
    first = publish.push(client, item.image, repo, item.immutable, CONSOLE)
    immutable, alias = publish.publish(client, repo, [item], CONSOLE)
    assert (immutable.digest, immutable.moved) == (first.digest, None)
    assert (alias.digest, alias.moved) == (first.digest, 0)


def test_a_stand_in_is_refused(
    client: docker.DockerClient, repo: str, make: Make, records_folder: Path
) -> None:
    [reason] = gathered(client, repo, make(stand_in="torch"), records_folder)
    assert "is a stand-in for tests" in reason


def test_an_image_of_other_inputs_is_refused(
    client: docker.DockerClient, repo: str, make: Make, records_folder: Path
) -> None:
    [dirty] = gathered(client, repo, make(revision="abc-dirty"), records_folder)
    assert "was built from a dirty tree" in dirty
    [other] = gathered(client, repo, make(inputs="other"), records_folder)
    assert "was built from abc, and its inputs have changed since" in other


def test_the_image_of_a_cell_has_its_inputs_digest(image: Image, cell: Cell) -> None:
    """The label exists, as `publish` requires."""
    assert image.labels[INPUTS] == digest_for(cell)


def test_without_a_passed_record_it_is_refused(
    client: docker.DockerClient, repo: str, make: Make, records_folder: Path
) -> None:
    item = make()
    [record] = (found for found in records.history(item.cell.id, (records_folder,)) if found.suite == "image")
    records.write(msgspec.structs.replace(record, outcome="failed"), roots=(records_folder,))
    folder = records.folder_of(item.cell.id, INPUTS_DIGEST, records_folder)
    [layers] = folder.glob("layers-*.json")
    layers.unlink()
    assert gathered(client, repo, item, records_folder) == [
        f"{item.cell.id}: the suite image failed at its last attempt: run its tests",
        f"{item.cell.id}: no record of the suite layers on this image: run its tests",
    ]


def test_a_cell_that_is_not_built_is_reported(client: docker.DockerClient, repo: str, make: Make) -> None:
    absent = msgspec.structs.replace(make().cell, tag="rlhf-stacks-tests:absent")
    assert publish.collect(client, repo, [absent]) == ([], ["rlhf-stacks-tests:absent is not built"])


def test_an_unreachable_registry_is_reported_in_one_line(
    client: docker.DockerClient, make: Make, records_folder: Path
) -> None:
    """Both the check and the push report it."""
    item = make()
    for attempt in (
        lambda: publish.collect(client, UNREACHABLE, [item.cell], (records_folder,)),
        lambda: publish.push(client, item.image, UNREACHABLE, item.immutable, CONSOLE),
    ):
        with pytest.raises(UserError, match=r"the registry 127\.0\.0\.1:1 cannot be reached") as raised:
            attempt()
        assert "\n" not in str(raised.value)
    assert item.image.tags == [item.cell.tag]


@pytest.fixture
def guarded() -> Any:
    """Run a registry that requires a login."""
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="registry-") as folder,
        server.running(Path(folder), HTPASSWD) as running,
    ):
        yield running


def test_a_login_is_required(
    client: docker.DockerClient,
    guarded: server.Registry,
    make: Make,
    records_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error names the command; with a login in Docker's configuration the push succeeds."""
    item, repo = make(), f"{guarded.host}/tests/guarded"
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    for attempt in (
        lambda: publish.collect(client, repo, [item.cell], (records_folder,)),
        lambda: publish.push(client, item.image, repo, item.immutable, CONSOLE),
    ):
        with pytest.raises(UserError, match=f"run `docker login {guarded.host}`") as raised:
            attempt()
        assert "\n" not in str(raised.value)
    login = {"auths": {guarded.host: {"auth": base64.b64encode(USER.encode()).decode()}}}
    (tmp_path / "config.json").write_text(json.dumps(login), encoding="utf-8")
    logged_in = docker.from_env(timeout=publish.PUSH_SECONDS)
    assert gathered(logged_in, repo, item, records_folder) == []
    assert publish.publish(logged_in, repo, [item], CONSOLE)[0].moved
