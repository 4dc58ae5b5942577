"""Compile the recipes of a ROCm cell with Debian's HIP: the cell's own stages of images/Dockerfile.

They differ from a build of the cell in two inputs: the builder root is that of a toolchain, and torch is a
wheel made by `torch_for_rocm`. BuildKit keeps what was compiled by the digest of everything it is built from.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from scripts.digests import sha256, sha256_file
from scripts.docker.client import build_environment, docker_command
from scripts.errors import UserError
from scripts.hip import sources
from scripts.hip.inspection import Built
from scripts.images import build_log, context, rootfs
from scripts.images.build import write_secrets
from scripts.images.pins import pinned
from scripts.images.rootfs import Root
from scripts.locking import exclusive_lock
from scripts.locks import index_config, lockfile
from scripts.matrix.load import Cell, Matrix, expand, stand_ins
from scripts.matrix.model import STAND_IN, CompileProof, SourceBuild, named, targets
from scripts.patches.pristine import fetch_pristine
from scripts.patches.wheel_files import WheelFile, write_wheel
from scripts.paths import ROOT
from scripts.processes import captured

FOLDER = ROOT / "build" / "hip"
HERE = ROOT / "scripts" / "hip"
PINS = HERE / "requirements.txt"
TRANSLATOR = ("torch_for_rocm.py", "symbols.py")
TARGET = "compiled"
# What compiling depends on, of the build context; BuildKit keeps wheels by the same files.
COMPILED = ("tools/build-source", "sources/**/*", "requirements/*")
SOURCE_STAGE = re.compile(r"^FROM \S+ AS \S+-source$.*?(?=^FROM )", re.MULTILINE | re.DOTALL)
WHEEL = "Wheel-Version: 1.0\nGenerator: rlhf-stacks\nRoot-Is-Purelib: false\nTag: {}\n"
METADATA = "Metadata-Version: 2.1\nName: torch\nVersion: {}\n"
TAG = "cp311-cp311-linux_x86_64"


class IncompleteError(UserError):
    """Some sources were not compiled: outcome and reason of each source."""

    def __init__(self, message: str, sources: dict[str, tuple[int, str]]) -> None:
        super().__init__(message)
        self.sources = sources


class _Ended(NamedTuple):
    """What a build printed, why it failed (empty if it did not), and why it did not reach other sources."""

    printed: str
    cause: str
    limit: str


def compiled(
    matrix: Matrix, cell: Cell, toolchain: str, minutes: float | None = None
) -> tuple[dict[str, Path], dict[str, tuple[int, str]]]:
    """Return the wheels that the recipes of ``cell`` give with a toolchain, and `sources.outcomes`.

    Wheels are by the names of their packages. Raises `IncompleteError` if not all sources of a recipe were
    compiled, also after ``minutes``.
    """
    root, proof = toolchain_root(matrix, toolchain), proof_of(matrix, cell)
    builder, runtime = rootfs.image(root), rootfs.image(rootfs.roots(cell)[0])
    work = FOLDER / cell.variant / toolchain
    with exclusive_lock(work, "a compilation of the same recipes"):
        torch = torch_wheel(cell, proof, root, builder)
        folder = lay_out(matrix, cell, pinned(torch)[1], work / "context")
        context.place(torch, folder / "wheels" / cell.layers[0].name / torch.name)
        context.normalise_modes(folder)
        found = _build(folder, runtime, builder, work / "wheels", minutes)
    return wheels_by_package(work / "wheels"), found


def wheels_by_package(folder: Path) -> dict[str, Path]:
    """Return the wheels in ``folder`` by the names of their packages."""
    return {wheel.name.split("-")[0]: wheel for wheel in sorted(folder.glob("*.whl"))}


def proof_of(matrix: Matrix, cell: Cell) -> CompileProof:
    """Return how the recipes of a cell are compiled here; `UserError` if the matrix does not say it."""
    proof = named(matrix.variants, cell.variant).compile_proof
    if proof is None or cell.stand_in:
        proved = [one.id for one in expand(matrix) if named(matrix.variants, one.variant).compile_proof]
        raise UserError(f"{cell.id} has no compile_proof in matrix.yaml: choose from {', '.join(proved)}")
    return proof


def builds(cell: Cell) -> tuple[SourceBuild, ...]:
    """Return the source builds that need the lowest layer alone: only these are compiled here."""
    lowest = {*cell.layers[0].packages, "setuptools"}
    return tuple(build for build in cell.build_from_source if lowest.issuperset(build.needs))


def packages(cell: Cell) -> set[str]:
    """Return the names of the wheels that the recipes give."""
    return {(build.recipe or build.package).replace("-", "_") for build in builds(cell)}


def built(cell: Cell, package: str) -> Built:
    """Return which build of a package the recipes of ``cell`` give."""
    return package, int(_rocm(cell).partition(".")[0])


def _rocm(cell: Cell) -> str:
    """Return the release of ROCm for which the cell's torch is built, such as 7.2."""
    return cell.package("torch").requirement.partition("+rocm")[2]


def toolchain_root(matrix: Matrix, toolchain: str) -> Root:
    """Return the root of a toolchain by its name."""
    return rootfs.toolchain(matrix, named(matrix.toolchains, toolchain))


def digest(matrix: Matrix, cell: Cell) -> str:
    """Return the sha256 of all that a cell's wheels are built from, and its GPUs; it needs no Docker."""
    proof = proof_of(matrix, cell)
    everything: list[object] = [targets(cell.accelerator)]
    for root in (toolchain_root(matrix, toolchain) for toolchain in proof.toolchains):
        with tempfile.TemporaryDirectory() as temporary:
            folder = lay_out(matrix, cell, torch_digest(cell, proof, root), Path(temporary, "context"))
            everything.append([root.name, root.recipe, rootfs.roots(cell)[0].recipe, *compiled_from(folder)])
    return sha256(msgspec.json.encode(everything, order="sorted"))


def torch_digest(cell: Cell, proof: CompileProof, root: Root) -> str:
    """Return the sha256 of all that `torch_wheel` depends on."""
    code = ((HERE / name).read_text(encoding="utf-8") for name in TRANSLATOR)
    parts = (proof.torch, root.recipe, cell.package("torch").requirement, *code)
    return sha256("\0".join(parts))


def torch_wheel(cell: Cell, proof: CompileProof, root: Root, builder: str) -> Path:
    """Return a wheel that extension builders take for torch's ROCm wheel; it cannot be executed."""
    version = cell.package("torch").requirement.partition("==")[2]
    wheel = FOLDER / "torch" / torch_digest(cell, proof, root)[:12] / f"torch-{version}-{TAG}.whl"
    if wheel.exists():
        return wheel
    released = torch_released(cell, proof)
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        names = {released: "/released.whl:ro", HERE: "/hip:ro", Path(temporary): "/out"}
        mounts = [f"--volume={path}:{inside}" for path, inside in names.items()]
        command = ["python3", "-B", f"/hip/{TRANSLATOR[0]}", "/released.whl", version, _rocm(cell), "/out"]
        done = captured([*docker_command(), "run", "--rm", "--network=none", *mounts, builder, *command])
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no error message"])[-1]
            raise UserError(f"torch's headers cannot be translated: {reason}")
        files = {
            str(path.relative_to(temporary)): WheelFile(path.read_bytes(), 0o644)
            for path in Path(temporary).rglob("*")
            if path.is_file()
        }
    info = f"torch-{version}.dist-info"
    files[f"{info}/METADATA"] = WheelFile(METADATA.format(version).encode(), 0o644)
    files[f"{info}/WHEEL"] = WheelFile(WHEEL.format(TAG).encode(), 0o644)
    return write_wheel(files, info, wheel)


def torch_released(cell: Cell, proof: CompileProof) -> Path:
    """Return torch's CUDA wheel, downloaded if necessary."""
    return fetch_pristine("torch", cell.package("torch").version, [proof.torch])


def lay_out(matrix: Matrix, cell: Cell, torch: str, folder: Path) -> Path:
    """Write the part of a cell's build context that its source builds need; return ``folder``.

    ``torch`` is the requirement of the wheel that replaces torch's.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    context.place_tools(folder)
    stand_in = next(one for one in stand_ins(matrix) if one.id == cell.id + STAND_IN)
    lock = lockfile.path(stand_in).read_text(encoding="utf-8")
    # vLLM's package for CPUs has another name: the cells for GPUs of the same stack lock the sources.
    same = {lockfile.path(one) for one in expand(matrix) if one.stack == cell.stack and one.id != cell.id}
    pins_of_sources = lock + "".join(
        path.read_text(encoding="utf-8") for path in sorted(same) if path.exists()
    )
    blocks = {entry.name: entry.block for entry in lockfile.parse(PINS.read_text(encoding="utf-8") + lock)}
    lowest = cell.layers[0]
    present = [name for name in lowest.packages if name in blocks and name != "torch"]
    against = torch + "".join(blocks[name] for name in (*present, *proof_of(matrix, cell).requires))
    context.write(folder / "requirements" / f"{lowest.name}.txt", against)
    context.write(folder / "trim" / f"{lowest.name}.txt", "")
    (folder / "side_by_side" / lowest.name).mkdir(parents=True)
    for layer in cell.layers:
        place = folder / "sources" / layer.name
        context.place_sources(cell, layer, pins_of_sources, place)
        with (place / "env").open("a", encoding="utf-8") as file:
            file.writelines(f"{setting.name}='{setting.value}'\n" for setting in proof_of(matrix, cell).env)
        context.write(place / "built-against.txt", against)
        built = (build for build in cell.build_from_source if build.package in layer.packages)
        pins = "".join(blocks[build.package] for build in built if not build.recipe)
        context.write(folder / "requirements" / f"{lockfile.SOURCE.format(layer.name)}.txt", pins)
    names = {build.package for build in builds(cell)}
    stages = [layer.name for layer in cell.layers if names.intersection(layer.packages)]
    copies = "".join(f"COPY --from={name}-source /wheels /\n" for name in stages)
    text = context.dockerfile(cell, lowest.name)
    context.write(folder / "Dockerfile", f"{text}FROM scratch AS {TARGET}\n{copies}")
    return folder


def _build(
    folder: Path, runtime: str, builder: str, wheels: Path, minutes: float | None
) -> dict[str, tuple[int, str]]:
    """Build the stages that compile, move the wheels to ``wheels``, and return `sources.outcomes`.

    A failure leaves no wheel. After ``minutes`` the build is ended.
    """
    log = folder.with_name(f"{folder.name}-{_key(folder, runtime, builder)[:12]}.log")
    for other in folder.parent.glob(f"{folder.name}-*.log"):
        if other != log:
            other.unlink()
    config = index_config.load()
    shutil.rmtree(wheels, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        secrets = write_secrets(config, Path(temporary))
        out = Path(temporary, "wheels")
        command = [
            *docker_command(),
            "build",
            "--progress=plain",
            f"--target={TARGET}",
            f"--output=type=local,dest={out}",
            f"--build-arg=RUNTIME_BASE={runtime}",
            f"--build-arg=BUILDER_BASE={builder}",
            *(f"--build-arg={name}" for name in config.proxies),
            *(f"--secret=id={name},src={path}" for name, path in secrets.items()),
            str(folder),
        ]
        environment = build_environment(config.environment())
        done = _run(command, environment, log, minutes)
        text, built = log.read_text(encoding="utf-8"), wheels_by_package(out)
        if not done.cause and not built.keys() <= sources.wheels(text):
            print("the log of the compilation that BuildKit has is lost: compiling again", flush=True)
            done = _run([*command, "--no-cache"], environment, log, minutes)
            text = done.printed
        found = sources.outcomes(text, done.limit)
        if done.cause:
            message = f"the recipes do not compile: {done.cause} (full log: {log.relative_to(ROOT)})"
            raise IncompleteError(message, found) if found else UserError(message)
        if not built.keys() <= sources.wheels(text) or sources.lacks_sources(text):
            raise UserError(
                f"the log does not show what the recipes compiled (full log: {log.relative_to(ROOT)})"
            )
        out.rename(wheels)
    return found


def _run(command: list[str], environment: dict[str, str], log: Path, minutes: float | None) -> _Ended:
    """Run a build and append what it prints to ``log``.

    BuildKit compiles a stage once, now or in an earlier run with the same inputs: the log has all runs.
    """
    cause, limit, code = "", "not reached", 0
    with log.open("a+", encoding="utf-8") as file:
        start = file.seek(0, os.SEEK_END)
        try:
            code = subprocess.run(
                command,
                env=environment,
                stdout=file,
                stderr=file,
                check=False,
                timeout=minutes and minutes * 60,
            ).returncode
        except subprocess.TimeoutExpired:
            cause = limit = f"not compiled within {minutes:g} minutes"
        file.seek(start)
        printed = file.read()
    return _Ended(printed, cause or (build_log.cause(printed) if code else ""), limit)


def _key(folder: Path, runtime: str, builder: str) -> str:
    """The sha256 of what the stages that compile depend on."""
    return sha256(msgspec.json.encode([runtime, builder, *compiled_from(folder)], order="sorted"))


def compiled_from(folder: Path) -> tuple[dict[str, str], list[str]]:
    """What compiling depends on in a build context: files with their sha256, and the stages that compile."""
    files = [file for place in COMPILED for file in sorted(folder.glob(place)) if file.is_file()]
    content = {str(path.relative_to(folder)): sha256_file(path) for path in files}
    return content, SOURCE_STAGE.findall((folder / "Dockerfile").read_text(encoding="utf-8"))
