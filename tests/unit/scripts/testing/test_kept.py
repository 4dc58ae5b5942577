"""A tested image keeps a tag until another one of its cell is as well tested."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest

from scripts.images.build import remove_unnamed
from scripts.matrix.load import find, load
from scripts.testing import records
from scripts.testing.kept import KEPT, keep
from scripts.testing.records import Record

CELL = find(load(), load().default)
NAME = CELL.tag + KEPT


class Docker:
    """Images, with the id of the one that each tag names; those ``in_use`` cannot be removed."""

    def __init__(self, *ids: str) -> None:
        self.ids, self.tags, self.in_use = set(ids), dict[str, str](), set[str]()
        self.images = self

    def get(self, name: str) -> Any:
        found = self.tags.get(name, name)
        if found not in self.ids:
            raise docker.errors.ImageNotFound("absent")
        tags = [tag for tag, named in self.tags.items() if named == found]
        return SimpleNamespace(id=found, tags=tags, tag=lambda tag: self.tags.update({tag: found}))

    def remove(self, image: str) -> None:
        if image in self.in_use:
            raise docker.errors.APIError("a container uses it")
        self.ids.remove(image)


@pytest.fixture
def machine(tmp_path: Path) -> Any:
    """Record an attempt of a suite on an image of the cell, and tag the image if it is to be kept."""

    def attempt(client: Docker, image: str, suite: str, outcome: str = "passed") -> None:
        made = Record(
            cell=CELL.id,
            image=image,
            inputs=image * 12,
            suite=suite,
            tests="t",
            revision="r",
            when=records.now(),
            seconds=1,
            outcome=outcome,  # type: ignore[arg-type]
            passed=1,
        )
        folder = tmp_path / CELL.id / image
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{suite}.json").write_bytes(records.encode(made))
        keep(client, CELL, made, tmp_path)  # type: ignore[arg-type]

    return attempt


def test_a_rebuild_does_not_remove_a_tested_image_until_the_new_one_is_as_well_tested(machine: Any) -> None:
    client = Docker("a", "b")
    for suite in ("image", "layers"):
        machine(client, "a", suite)
    assert client.tags == {NAME: "a"}
    remove_unnamed(client, ["a"])  # type: ignore[arg-type]
    machine(client, "b", "image")
    machine(client, "b", "layers", "failed")
    assert (client.tags, client.ids) == ({NAME: "a"}, {"a", "b"})
    machine(client, "b", "layers")
    assert (client.tags, client.ids) == ({NAME: "b"}, {"b"})


def test_a_failed_suite_keeps_nothing(machine: Any) -> None:
    client = Docker("a")
    machine(client, "a", "image", "failed")
    assert client.tags == {}
    remove_unnamed(client, ["a", "a"])  # type: ignore[arg-type]
    assert client.ids == set()


def test_an_image_that_a_container_uses_stays() -> None:
    client = Docker("a")
    client.in_use.add("a")
    remove_unnamed(client, ["a"])  # type: ignore[arg-type]
    assert client.ids == {"a"}
