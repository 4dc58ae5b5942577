"""The build context of a proof: the cell's own recipes, with another compiler and another torch."""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from scripts.errors import UserError
from scripts.hip import recipes
from scripts.images import context, rootfs
from scripts.matrix.load import find, load
from scripts.matrix.model import named

CELL = "ray2.12.0-vllm0.4.2-rocm6.1"


def test_the_context_has_the_cell_s_recipes_and_settings(tmp_path: Path) -> None:
    matrix = load()
    folder = recipes.lay_out(matrix, find(matrix, CELL), "torch==1\n", tmp_path / "context")
    own = context.IMAGES / "sources" / "vllm-rocm-ops"
    for file in ("build", "setup.py"):
        assert (folder / "sources/vllm/vllm-rocm-ops" / file).read_bytes() == (own / file).read_bytes()
    assert (folder / "sources/vllm/vllm-rocm-ops/sdist.txt").read_text().startswith("vllm==0.4.2 ")
    assert "DS_BUILD_FUSED_ADAM='1'" in (folder / "sources/openrlhf/env").read_text()
    assert (folder / "requirements/openrlhf-source.txt").read_text().startswith("deepspeed==0.15.0 ")
    assert (folder / "requirements/torch.txt").read_text().startswith("torch==1\nnumpy==")
    assert re.search(r"^FROM scratch AS compiled$", (folder / "Dockerfile").read_text(), re.MULTILINE)


def test_the_context_of_the_current_recipe_has_what_it_imports_and_its_own_stages(
    tmp_path: Path,
) -> None:
    matrix = load()
    cell = find(matrix, "ray2.55.0-vllm0.29.0-rocm7")
    folder = recipes.lay_out(matrix, cell, "torch==1\n", tmp_path / "context")
    assert (folder / "sources/vllm/vllm-rocm/sdist.txt").read_text().startswith("vllm==0.29.0 ")
    pins = re.findall(r"(?m)^[a-z-]+(?===)", (folder / "requirements/torch.txt").read_text())
    assert set(pins) == {"torch", *recipes.proof_of(matrix, cell).requires}
    for layer in ("vllm", "openrlhf"):
        environment = (folder / "sources" / layer / "env").read_text()
        assert "PYTORCH_ROCM_ARCH='gfx942'\n" in environment
        assert "CMAKE_BUILD_PARALLEL_LEVEL='2'\n" in environment
    assert recipes.packages(cell) == {"vllm_rocm", "deepspeed"}
    stages = (folder / "Dockerfile").read_text().partition("FROM scratch AS compiled\n")[2]
    assert stages == "COPY --from=vllm-source /wheels /\nCOPY --from=openrlhf-source /wheels /\n"


Build = Callable[[str], dict[str, tuple[int, str]]]  # by a shell script, to `sources.outcomes`
LISTED = "echo '#9 1.0 CMakeFiles/_C.dir/csrc/one.hip.o'; "
COMPILED = "echo '#9 2.0 [1/2] Building HIP object CMakeFiles/_C.dir/csrc/one.hip.o'; "
CREATED = "echo '#9 3.0   Created wheel for a-b: filename=a_b-1.whl size=1'; "
CACHED = "echo '#9 CACHED'; "
WHEEL = """for word in "$@"; do case $word in --output=*) out=${word##*dest=};; esac; done
mkdir -p "$out"; echo wheel > "$out/a_b-1.whl" """


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Build:
    """Build with a shell script in place of Docker's command; the context is one file."""
    context_folder = tmp_path / "context"
    context_folder.mkdir()
    (context_folder / "Dockerfile").write_text("FROM a AS b\n")
    monkeypatch.setattr(recipes, "ROOT", tmp_path)

    def built(script: str) -> dict[str, tuple[int, str]]:
        monkeypatch.setattr(recipes, "docker_command", lambda: ["bash", "-c", script, "docker"])
        return recipes._build(context_folder, "runtime", "builder", tmp_path / "wheels", 0.01)

    return built


@pytest.mark.parametrize(
    ("end", "reason"), [("exit 1", "not reached"), ("exec sleep 60", "not compiled within 0.01 minutes")]
)
def test_a_build_that_fails_or_takes_too_long_leaves_outcomes_and_no_wheel(
    end: str, reason: str, build: Build, tmp_path: Path
) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "old.whl").touch()
    with pytest.raises(recipes.IncompleteError) as error:
        build(LISTED + end)
    assert error.value.sources == {"csrc/one.hip": (0, reason)}
    assert not wheels.exists()


def test_what_buildkit_has_compiled_before_keeps_its_sources(
    build: Build,
) -> None:
    """In a run that passed, and in one that failed or was ended after the stage."""
    with pytest.raises(recipes.IncompleteError) as error:
        build(LISTED + COMPILED + CREATED + "exit 1")
    assert error.value.sources == {"csrc/one.hip": (1, "")}
    for _ in range(2):
        assert build(CACHED + WHEEL) == {"csrc/one.hip": (1, "")}


def test_of_a_source_that_was_compiled_again_the_last_outcome_counts(
    build: Build,
) -> None:
    build(LISTED + COMPILED + CREATED + WHEEL)
    with pytest.raises(recipes.IncompleteError) as error:
        build(LISTED + "exit 1")
    assert error.value.sources == {"csrc/one.hip": (0, "not reached")}


def test_without_its_log_the_compilation_is_repeated(build: Build, tmp_path: Path) -> None:
    """And the log of other inputs is not that of these."""
    again = f'case " $* " in *" --no-cache "*) {LISTED}{COMPILED}{CREATED};; esac; {WHEEL}'
    build(LISTED + COMPILED + CREATED + WHEEL)
    (tmp_path / "context" / "Dockerfile").write_text(
        "FROM a AS b-source\nRUN other\nFROM scratch AS compiled\n"
    )
    assert build(again) == {"csrc/one.hip": (1, "")}
    assert len(list(tmp_path.glob("context-*.log"))) == 1
    (tmp_path / "context" / "Dockerfile").write_text("FROM c AS d-source\nFROM scratch AS compiled\n")
    with pytest.raises(UserError, match="the log does not show what the recipes compiled"):
        build(CACHED + WHEEL)


def test_a_recipe_of_cmake_has_to_list_its_sources(build: Build, tmp_path: Path) -> None:
    configured = "echo '#9 0.9 -- Build files have been written to: /operators'; "
    assert build(configured + LISTED + COMPILED + CREATED + WHEEL) == {"csrc/one.hip": (1, "")}
    (log,) = tmp_path.glob("context-*.log")
    log.unlink()
    with pytest.raises(UserError, match="the log does not show what the recipes compiled"):
        build(configured + CREATED + WHEEL)


def test_a_recipe_that_lists_no_source_is_compiled_once(build: Build) -> None:
    never = 'case " $* " in *" --no-cache "*) exit 1;; esac; '
    for before in (CREATED, CACHED):
        assert build(never + before + WHEEL) == {}


def test_the_digest_follows_the_recipe_and_the_toolchain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = load()
    cell = find(matrix, CELL)
    before = recipes.digest(matrix, cell)
    assert recipes.digest(matrix, cell) == before
    with monkeypatch.context() as changed:
        changed.setattr(rootfs, "HIP", tmp_path / "hip.sh")
        (tmp_path / "hip.sh").write_text("#!/bin/sh\n")
        assert recipes.digest(matrix, cell) != before
    monkeypatch.setattr(recipes, "HERE", tmp_path)
    for name in recipes.TRANSLATOR:
        (tmp_path / name).write_text("")
    assert recipes.digest(matrix, cell) != before


@pytest.mark.parametrize(
    ("old", "new", "counts"),
    [("/opt/tools/build-source /wheels\n", "true\n", True), ("EXPOSE 6379", "EXPOSE 6380", False)],
)
def test_of_the_dockerfile_only_the_stages_that_compile_count(
    old: str, new: str, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix, written = load(), context.dockerfile
    cell = find(matrix, CELL)
    before = recipes.digest(matrix, cell)
    monkeypatch.setattr(context, "dockerfile", lambda *given: written(*given).replace(old, new))
    assert (recipes.digest(matrix, cell) != before) == counts


def test_another_gpu_is_another_input() -> None:
    matrix = load()
    cell = find(matrix, CELL)
    assert cell.accelerator.gpus
    gpus = msgspec.structs.replace(cell.accelerator.gpus, architectures=("gfx942",))
    other = msgspec.structs.replace(cell, accelerator=msgspec.structs.replace(cell.accelerator, gpus=gpus))
    assert recipes.digest(matrix, other) != recipes.digest(matrix, cell)


@pytest.mark.parametrize("cell", ["ray2.55.0-vllm0.29.0-cpu", f"{CELL}-stand-in"])
def test_a_cell_without_a_proof_is_refused_with_those_that_have_one(cell: str) -> None:
    with pytest.raises(UserError, match=f"{cell} has no compile_proof in matrix.yaml: choose from {CELL}"):
        recipes.proof_of(load(), find(load(), cell))


def test_a_toolchain_s_root_has_files_of_packages_that_are_not_installed() -> None:
    matrix = load()
    declared = named(matrix.toolchains, "hip5.7")
    root = rootfs.toolchain(matrix, declared)
    assert {deb.name for deb in root.unpacked} == {one.name for one in declared.unpacked}
    hooks = [
        option for option in rootfs.command(root, Path("t"), Path("p")) if "dpkg-deb --extract" in option
    ]
    assert len(hooks) == len(root.unpacked)
    assert not {deb.name for deb in root.unpacked} & {deb.name for deb in root.locked}
