"""The inputs of a build and their digest."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from scripts.images.inputs import INPUTS, REVISION, Inputs, image_labels
from scripts.matrix.load import expand, load

DEFAULT = next(cell for cell in expand(load()) if cell.is_default)


def test_labels_name_versions_patches_and_what_is_unverified() -> None:
    """Cell, versions, patches, dates, and what was not shown."""
    marks = image_labels(DEFAULT, "base:1", ["p/0001"])
    assert marks["io.rlhf-stacks.version.ray"] == DEFAULT.versions["ray"]
    assert marks["io.rlhf-stacks.patches"] == "p/0001"
    assert marks["io.rlhf-stacks.unverified"] == DEFAULT.tested.unverified


def inputs_in(folder: Path, **changed: Any) -> Inputs:
    """Inputs of a build whose context has one file."""
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text("FROM scratch", encoding="utf-8")
    return replace(Inputs(folder, "base:1", "builder:1", {"title": "x"}), **changed)


def test_the_same_inputs_have_the_same_digest_in_every_folder(tmp_path: Path) -> None:
    """Two checkouts of a commit make the same image."""
    assert inputs_in(tmp_path / "a").digest == inputs_in(tmp_path / "b").digest


@pytest.mark.parametrize("changed", [{"runtime": "base:2"}, {"builder": "b"}, {"labels": {"title": "y"}}])
def test_every_input_changes_the_digest(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert inputs_in(tmp_path, **changed).digest != inputs_in(tmp_path).digest


def test_a_wheel_of_the_index_in_the_users_folder_does_not_change_the_digest(tmp_path: Path) -> None:
    """Its hash is in the requirements; a patched one and one with a local version count."""
    folder = tmp_path / "context"
    (folder / "wheels" / "ray").mkdir(parents=True)
    (folder / "wheels" / "stack").mkdir()
    before = inputs_in(folder).digest
    (folder / "wheels" / "ray" / "numpy-2.0-py3-none-any.whl").touch()
    assert inputs_in(folder).digest == before
    for counted in ("ray/torch-2+cpu-py3-none-any.whl", "stack/rlhf_stack-1-py3-none-any.whl"):
        (folder / "wheels" / counted).touch()
        assert inputs_in(folder).digest != before
        (folder / "wheels" / counted).unlink()


def test_files_folders_links_and_modes_change_the_digest(tmp_path: Path) -> None:
    folder = tmp_path / "context"
    digests = [inputs_in(folder).digest]
    link, file = folder / "link", folder / "new"
    changes: list[Callable[[], object]] = [
        file.touch,
        lambda: file.write_text("x", encoding="utf-8"),
        lambda: file.chmod(0o755),
        lambda: file.rename(folder / "other"),
        (folder / "empty").mkdir,
        lambda: (folder / "empty").chmod(0o775),
        lambda: (folder / "Dockerfile").chmod(0o664),
        lambda: link.symlink_to("Dockerfile"),
        link.unlink,
        lambda: link.symlink_to("empty"),
    ]
    for change in changes:
        change()
        digests.append(inputs_in(folder).digest)
    assert len(set(digests)) == len(digests) - 1  # without the link it is as it was before
    assert digests[7] == digests[9]


def test_an_image_is_reused_while_its_inputs_are_unchanged(tmp_path: Path) -> None:
    """Later commits do not matter; an image built from a dirty checkout is not reused."""
    given = inputs_in(tmp_path)
    marks = {REVISION: "abc", INPUTS: given.digest}
    assert given.matches(MagicMock(labels=marks))
    assert not given.matches(MagicMock(labels=marks | {REVISION: "abc-dirty"}))
    assert not given.matches(MagicMock(labels=marks | {INPUTS: "other"}))
    assert not given.matches(MagicMock(labels={}))
