"""An unavailable source is an immediate error; a stand-in differs from its cell only in packages."""

import dataclasses
import subprocess
from unittest.mock import MagicMock

import docker.errors
import msgspec
import pytest

from scripts.errors import UserError
from scripts.images import inputs
from scripts.images.inputs import NAMESPACE, image_labels, with_vendor_compiler
from scripts.locks import commands, preflight, resolver, targets
from scripts.matrix.load import MATRIX, Cell, expand, find, load, parse, stand_ins
from scripts.matrix.model import STAND_IN, Source

TEXT = MATRIX.read_text(encoding="utf-8")
ROCM = [cell for cell in expand(load()) if cell.accelerator.kind == "rocm"]
PACKAGE = Source(name="the wheels", purpose="are torch", requirement="torch==1+rocm")
IMAGE = Source(name="the image", purpose="has the compiler", image="vendor/dev:1")


@pytest.fixture
def cell() -> Cell:
    return msgspec.structs.replace(ROCM[0], sources=(PACKAGE, IMAGE))


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """The mocked index; it has every package unless a test changes that."""
    answer = MagicMock(return_value="torch==1+rocm\n")
    monkeypatch.setattr(resolver, "answer", answer)
    return answer


def test_an_unavailable_package_is_reported_with_its_purpose_and_the_stand_in(
    cell: Cell, index: MagicMock
) -> None:
    index.side_effect = UserError("no version")
    client = MagicMock()
    with pytest.raises(UserError) as caught:
        preflight.require(cell, client)
    message = str(caught.value)
    assert message.startswith(f"{cell.id} cannot be built without the wheels, which are torch: ")
    assert "torch==1+rocm" in message
    assert message.endswith(f"python -m scripts build {cell.id} --stand-in")
    client.images.get.assert_not_called()


def test_an_image_may_be_local_or_in_its_registry(cell: Cell, index: MagicMock) -> None:
    client = MagicMock()
    preflight.require(cell, client)
    client.images.get_registry_data.assert_not_called()
    client.images.get.side_effect = docker.errors.ImageNotFound("no")
    preflight.require(cell, client)
    client.images.get_registry_data.side_effect = docker.errors.APIError("no such host")
    with pytest.raises(
        UserError, match="without the image, which has the compiler: there is no local image vendor/dev:1"
    ):
        preflight.require(cell, client)
    assert index.call_args.args[0].alone


def test_other_cells_need_no_sources(index: MagicMock) -> None:
    for cell in expand(load()):
        if cell.accelerator.kind != "rocm":
            preflight.require(cell, MagicMock())
    index.assert_not_called()


@pytest.mark.parametrize("cell", ROCM, ids=lambda cell: cell.id)
def test_a_stand_in_is_the_twin_with_the_defaults_of_the_cell(cell: Cell) -> None:
    found = find(load(), cell.id + STAND_IN)
    twin = find(load(), found.lock)
    assert found in stand_ins(load())
    assert (found.id, found.tag) == (cell.id + STAND_IN, cell.tag + STAND_IN)
    assert found.accelerator.kind == twin.accelerator.kind == "cpu"
    assert found.accelerator.profiles == cell.accelerator.profiles != ()
    values = {setting.name: setting.value for setting in found.env}
    assert {setting.name: setting.value for setting in cell.env}.items() <= values.items()
    assert {setting.name for setting in twin.env} <= set(values)
    same = (
        "packages",
        "requirements",
        "excluded",
        "overrides",
        "layers",
        "build_from_source",
        "base",
        "lock",
    )
    assert all(getattr(found, name) == getattr(twin, name) for name in same)
    assert targets.requirements(found) == targets.requirements(twin)
    assert not found.sources
    targets.require(found)


def test_only_a_stand_in_has_its_label() -> None:
    cell = find(load(), ROCM[0].id + STAND_IN)
    assert image_labels(cell, "base", [])[f"{NAMESPACE}.stand-in"] == cell.stand_in
    assert not any(f"{NAMESPACE}.stand-in" in image_labels(other, "b", []) for other in expand(load()))


def test_a_cell_that_was_never_locked_is_not_stale(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(targets.unlocked(cell) for cell in ROCM)
    assert commands.lock(check=True, offline=True) == 0
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match=f"{ROCM[0].id} is not locked: run .* where the wheels of"):
        targets.require(ROCM[0])


def test_a_lock_that_cannot_be_written_names_the_unavailable_source(index: MagicMock) -> None:
    index.side_effect = UserError("no version")
    with pytest.raises(UserError, match=f"{ROCM[0].id} cannot be built without the wheels of PyTorch"):
        commands.lock([ROCM[0].id])


def test_a_stand_in_needs_the_same_ray() -> None:
    entry = TEXT.index("  - variant: legacy-cpu\n    ray: &ray_2_9\n")
    text = TEXT[:entry] + TEXT[entry:].replace("variant: legacy-cpu", "variant: current-cpu", 1)
    with pytest.raises(UserError, match=r"legacy-cpu has no cell with Ray 2\.9\.3, which the stand-in needs"):
        parse(text)


def test_a_source_is_an_image_or_a_package() -> None:
    with pytest.raises(UserError, match=r"sources\[0\]: expected either `image` or `requirement`"):
        parse(TEXT.replace('        requirement: "torch==2.4.0+rocm6.1"\n', "", 1))


def test_only_the_builder_gets_the_compiler_of_a_vendor(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    @dataclasses.dataclass
    class Done:
        returncode: int
        stderr: str = "step 1\nno such image"

    def run(arguments: list[str], **_: object) -> Done:
        calls.append(arguments)
        return Done(len(calls) - 1)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(inputs, "docker_command", lambda: ["docker"])
    assert with_vendor_compiler(find(load(), load().default), "builder:1") == "builder:1"
    tag = with_vendor_compiler(cell, "builder:1")
    assert tag.startswith("builder:1-")
    assert {"--build-arg=BUILDER_BASE=builder:1", "--build-arg=VENDOR=vendor/dev:1", f"--tag={tag}"} <= set(
        calls[0]
    )
    with pytest.raises(
        UserError, match="the compiler of vendor/dev:1 cannot be copied to the builder: no such image"
    ):
        with_vendor_compiler(cell, "builder:1")
