"""An unavailable source is an immediate error; a stand-in differs from its cell only in packages."""

import functools
import http.server
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import docker.errors
import msgspec
import pytest

from scripts.digests import sha256, sha256_file
from scripts.errors import UserError
from scripts.images import inputs
from scripts.images.context import IMAGES
from scripts.images.inputs import NAMESPACE, image_labels, with_vendor_compiler
from scripts.locks import commands, index_config, lockfile, preflight, resolver, targets
from scripts.locks.index_config import PipConfig
from scripts.matrix.load import MATRIX, Cell, expand, find, load, parse, plain_index_cells, stand_ins
from scripts.matrix.model import PLAIN_INDEX, STAND_IN, Source
from scripts.patches.wheel_files import WheelFile, write_wheel

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
    index.side_effect = UserError("torch cannot be resolved: no version")
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
        if cell.accelerator.kind != "rocm" and not cell.plain_index:
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
        *("packages", "requirements", "excluded", "overrides", "layers", "build_from_source", "base", "lock"),
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
    index.side_effect = UserError("torch cannot be resolved: no version")
    with pytest.raises(UserError, match=f"{ROCM[0].id} cannot be built without the wheels of PyTorch"):
        commands.lock([ROCM[0].id])


def wheel(folder: Path, version: str) -> str:
    """Write an empty wheel of `tiny` and return a link to it that has its hash."""
    info = f"tiny-{version}.dist-info"
    files = {
        f"{info}/METADATA": WheelFile(
            f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n".encode(), 0o644
        ),
        f"{info}/WHEEL": WheelFile(b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n", 0o644),
    }
    path = write_wheel(files, info, folder / f"tiny-{version}-py3-none-any.whl")
    return f'<a href="/{path.name}#sha256={sha256_file(path)}">{path.name}</a>'


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    """A folder and the URL under which it is served."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_locked_wheel_is_found_in_each_place_that_a_build_searches(
    pages: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in an index after one that has other versions of it, as pip does."""
    folder, url = pages
    new, old = wheel(folder, "2+cpu"), wheel(folder, "1")
    for name, links in (("empty/tiny", ""), ("old/tiny", old), ("new/tiny", new), ("page", new)):
        (folder / name).mkdir(parents=True)
        (folder / name / "index.html").write_text(links, encoding="utf-8")
    requirement = f"tiny==2+cpu --hash=sha256:{new.partition('sha256=')[2].partition(chr(34))[0]}\n"
    nothing = PipConfig(index=f"{url}/empty/")
    configs = [
        (nothing, False),
        (replace(nothing, extra=(f"{url}/old/",)), False),
        (replace(nothing, extra=(f"{url}/old/", f"{url}/new/")), True),
        (replace(nothing, links=(f"{url}/page/",)), True),
        (replace(nothing, find_links=(folder,)), True),
    ]
    for config, expected in configs:
        monkeypatch.setattr(index_config, "load", functools.partial(lambda given: given, config))
        assert resolver.finds(requirement, "3.11", "x86_64-manylinux_2_36") == expected


def test_an_unreachable_index_is_not_a_missing_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_config, "load", lambda: PipConfig(index="http://127.0.0.1:9/simple"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(UserError, match="the package index cannot be reached for tiny==2"):
        resolver.finds(f"tiny==2 --hash=sha256:{'0' * 64}", "3.11", "x86_64-manylinux_2_36")


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """The mocked search for locked wheels; it finds none unless a test changes that."""
    finds = MagicMock(return_value=False)
    monkeypatch.setattr(preflight, "_finds", finds)
    return finds


def test_a_wheel_that_is_not_found_stops_a_build_with_its_name_and_the_cure(wheels: MagicMock) -> None:
    matrix = load()
    client = MagicMock()
    with pytest.raises(UserError) as caught:
        preflight.require(find(matrix, matrix.default), client)
    message = str(caught.value)
    assert message.startswith(f"{matrix.default} cannot be built: pip's configuration does not find torch==")
    assert "`pip config set global.extra-index-url URL` with the address of PyTorch's CPU index" in message
    assert "`pip config set global.find-links FOLDER`" in message
    assert message.endswith(f"or build the larger {matrix.default}{PLAIN_INDEX}")
    assert not client.mock_calls
    (call,) = wheels.call_args_list
    assert call.args[0].startswith("torch==")
    assert "--hash=sha256:" in call.args[0]


def test_without_a_cell_the_image_of_the_plain_index_replaces_one_that_cannot_be_built(
    wheels: MagicMock, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix = load()
    assert preflight.default_cell(matrix).id == matrix.default + PLAIN_INDEX
    assert capsys.readouterr().err.startswith(f"using {matrix.default}{PLAIN_INDEX}, a larger image: pip's")
    wheels.return_value = True
    assert preflight.default_cell(matrix) == find(matrix, matrix.default)
    assert capsys.readouterr().err == ""


def test_the_image_of_the_plain_index_has_the_same_versions_and_a_lock_without_local_ones() -> None:
    matrix = load()
    cell, plain = find(matrix, matrix.default), find(matrix, matrix.default + PLAIN_INDEX)
    assert plain in plain_index_cells(matrix)
    assert plain not in expand(matrix)
    assert (plain.versions, plain.layers, plain.env) == (cell.versions, cell.layers, cell.env)
    assert plain.stand_in
    targets.require(plain)
    versions = {
        name: {entry.name: entry.version for entry in lockfile.parse(lockfile.path(item).read_text())}
        for name, item in (("cell", cell), ("plain", plain))
    }
    assert versions["plain"]["torch"] == versions["cell"]["torch"].partition("+")[0]
    assert not any("+" in version for version in versions["plain"].values())
    assert set(versions["cell"]) <= set(versions["plain"])


def test_a_lock_needs_the_wheel_in_a_folder(index: MagicMock) -> None:
    index.side_effect = UserError("torch cannot be resolved: no version")
    with pytest.raises(UserError, match=r"cannot be locked: .* has torch==.*\+cpu\. Run `pip config"):
        commands.lock([load().default])


def test_refused_credentials_are_not_a_missing_package(index: MagicMock) -> None:
    index.side_effect = UserError(resolver.explain("torch", "error: 401 Unauthorized: no credentials"))
    with pytest.raises(UserError, match=r"the package index cannot be reached for torch: .* credentials"):
        commands.lock([load().default])


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

    @dataclass
    class Done:
        returncode: int
        stderr: str = "step 1\nno such image"

    def run(arguments: list[str], **_: object) -> Done:
        calls.append(arguments)
        return Done(len(calls) - 1)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(inputs, "docker_command", lambda: ["docker"])
    monkeypatch.setattr(inputs, "vendor_digest", lambda _: "sha256:1")
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


def test_a_moved_tag_of_a_vendor_is_another_builder(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a missing image, which is pulled; its digest is the registry's, which is the same everywhere."""
    local = SimpleNamespace(id="sha256:a", attrs={"RepoDigests": []})
    pulled = SimpleNamespace(id="sha256:b", attrs={"RepoDigests": ["else@sha256:c", "vendor/dev@sha256:d"]})
    images = MagicMock()
    images.get.side_effect = [local, docker.errors.ImageNotFound("absent"), pulled]
    images.pull.return_value = pulled
    monkeypatch.setattr(inputs, "connect", lambda _: MagicMock(images=images))
    monkeypatch.setattr(inputs, "docker_command", lambda: ["docker"])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: MagicMock(returncode=0))
    first, second, third = (with_vendor_compiler(cell, "builder:1") for _ in range(3))
    images.pull.assert_called_once_with("vendor/dev:1")
    assert first != second == third
    recipe = (IMAGES / "vendor" / "Dockerfile").read_text(encoding="utf-8")
    assert second == f"builder:1-{sha256('sha256:d' + recipe)[:12]}"
