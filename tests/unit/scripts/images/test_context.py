"""The build context of a cell."""

import os
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.errors import UserError
from scripts.images import context, wheels
from scripts.images.context import (
    IMAGES,
    built_against,
    dockerfile,
    lay_out,
    normalise_modes,
    place,
    quoted,
)
from scripts.images.inputs import Inputs
from scripts.images.pins import source_pin
from scripts.locks import lockfile, targets
from scripts.locks.index_config import PipConfig
from scripts.matrix.load import Cell, Setting, expand, load, with_option

CELLS = expand(load())
DEFAULT = next(cell for cell in CELLS if cell.is_default)
LAYERS = ("torch", "vllm", "ray", "openrlhf")  # stages of images/Dockerfile that the matrix fills


@given(st.text(alphabet=st.characters(codec="ascii", exclude_categories=["Cc"])))
def test_env_values_reach_the_image_literally(value: str) -> None:
    """Undo what a Dockerfile's double quotes do."""
    inside = quoted(value)[1:-1]
    assert re.sub(r'\\([\\"$])', r"\1", inside) == value
    assert not re.search(r'(?<!\\)(?:\\\\)*["$]', inside)


def test_dockerfile_ends_in_the_env_of_the_cell() -> None:
    """One file for every cell; the defaults come from the matrix."""
    setting = Setting(name="A", value="x y", reason="why", source="where")
    text = dockerfile(msgspec.structs.replace(DEFAULT, env=(setting,)), "torch")
    assert text.endswith('# why (where)\nENV A="x y"\n')
    assert text.replace("BUILT_ON=torch", "BUILT_ON=vllm").startswith(
        (IMAGES / "Dockerfile").read_text().rstrip()
    )


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


@pytest.mark.parametrize(
    "cell", [cell for cell in CELLS if not targets.unlocked(cell)], ids=lambda cell: cell.id
)
def test_a_source_build_waits_for_the_layers_of_what_it_needs_and_for_no_other(cell: Cell) -> None:
    """Only the current CUDA cell compiles DeepSpeed with the compiler that is in vLLM's layer."""
    texts = lockfile.layers(lockfile.path(cell).read_text(encoding="utf-8"), cell)
    against = {layer.name: built_against(cell, layer, texts) for layer in cell.layers}
    gpu = cell.variant == "current-cuda"
    assert against["vllm"] == ("torch",)
    assert against["openrlhf"] == (("torch", "vllm") if gpu else ("torch",))
    for build in cell.build_from_source:
        layer = next(layer.name for layer in cell.layers if build.package in layer.packages)
        pins = {entry.name for name in against[layer] for entry in lockfile.parse(texts[name])}
        assert {lockfile.distribution(cell, name) for name in build.needs} <= pins


def test_the_umask_of_the_checkout_and_of_the_build_does_not_change_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under umask 002, Ubuntu's for users, the user's group could otherwise write to /usr of the image."""
    runtime = wheels.build_runtime_wheel(tmp_path / "wheels", [])
    monkeypatch.setattr(context, "PATCHED", tmp_path / "wheels")
    monkeypatch.setattr(wheels, "make_wheels", lambda *_: [runtime])
    monkeypatch.setattr(context, "off_index_wheels", lambda *_: [])
    monkeypatch.setattr(context, "fetch_pristine", lambda *_: runtime)
    digests = set()
    for umask in (0o022, 0o002, 0o077):
        images = tmp_path / f"{umask:o}"
        shutil.copytree(IMAGES, images, ignore=shutil.ignore_patterns("runtime", "locks"))
        for path in [images, *images.rglob("*")]:
            path.chmod((0o777 if path.is_dir() or path.stat().st_mode & 0o100 else 0o666) & ~umask)
        monkeypatch.setattr(context, "IMAGES", images)
        before = os.umask(umask)
        try:
            folder = lay_out(DEFAULT, PipConfig(), images / "contexts")
        finally:
            os.umask(before)
        assert {path.stat().st_mode & 0o7777 for path in [folder, *folder.rglob("*")]} == {0o755, 0o644}
        assert (folder / "rootfs/usr/local/bin/rlhf-entrypoint").stat().st_mode & 0o7777 == 0o755
        digests.add(Inputs(folder, "base:1", "builder:1", {}).digest)
    assert len(digests) == 1


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


def test_an_option_is_built_into_the_top_layer_under_its_own_tag() -> None:
    """The recipe builds exactly the source distribution that the matrix names; the lock is unchanged."""
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


def test_an_option_that_a_cell_lacks_is_refused_with_the_reason() -> None:
    """The one for which the package is left out, or that there is none."""
    reason = next(item.reason for item in DEFAULT.excluded if item.name == "flash-attn")
    with pytest.raises(UserError, match=re.escape(f"{DEFAULT.id} cannot be built with flash-attn: {reason}")):
        with_option(DEFAULT, "flash-attn")
    with pytest.raises(UserError, match="the matrix has no such option"):
        with_option(DEFAULT, "nothing")
