"""Build the image of a cell.

``python -m scripts.images.image_build [CELL]``: lays out a build context from the matrix, the lock, the patched wheels and
``images/``, and gives it to BuildKit. The tag moves only when the whole build succeeded.
"""

import argparse
import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import TextIO

import docker.errors
import msgspec
from docker.models.images import Image
from rich.console import Console

from scripts.docker.client import check_space, connect, docker_command, need_space, with_docker_errors
from scripts.errors import UserError, run
from scripts.images import build_log, rootfs, wheels
from scripts.locking import exclusive_lock
from scripts.locks import index_config, lockfile, preflight
from scripts.locks.index_config import PipConfig
from scripts.matrix.load import Cell, Setting, find, load
from scripts.matrix.model import STAND_IN, Layer, SourceBuild
from scripts.patches.pristine import fetch_pristine
from scripts.patches.series import series_of
from scripts.paths import ROOT
from scripts.testing import records

IMAGES = ROOT / "images"
CONTEXTS = ROOT / "build" / "context"
PATCHED = ROOT / "build" / "wheels" / "patched"
LAYERS = ("torch", "vllm", "ray", "openrlhf")
NAMESPACE = "io.rlhf-stacks"
INPUTS = f"{NAMESPACE}.inputs"  # the label with `Inputs.digest`
REVISION = "org.opencontainers.image.revision"
ACCELERATOR = "RLHF_STACK_ACCELERATOR"  # read by rlhf_stack.config.env_vars
MARK = "# rlhf-stacks: given to a build as a secret, in no layer of an image"
# In 10^6 bytes: all layers, the builder root and its caches; a part of it when the image is there already.
BUILD_MEGABYTES, REBUILD_MEGABYTES = 9000, 3000
CONTEXT_MEGABYTES = 3000
SHOWN_SECONDS = 1.0


def dockerfile(cell: Cell) -> str:
    """The one Dockerfile with the env defaults of the cell."""
    lines = [
        f"# {setting.reason} ({setting.source})\nENV {setting.name}={quoted(setting.value)}"
        for setting in cell.env
    ]
    text = (IMAGES / "Dockerfile").read_text(encoding="utf-8").rstrip()
    return "\n".join([text, f"ENV {ACCELERATOR}={cell.accelerator.kind}", *lines]) + "\n"


def quoted(value: str) -> str:
    """A value as a Dockerfile's ENV takes it, literally."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


def settings_file(settings: Iterable[Setting]) -> str:
    """Settings as images/rootfs/usr/local/lib/rlhf-stack/environment reads them; texts in one line each."""
    lines = [
        f"# {' '.join(setting.reason.split())}\n{setting.name}={setting.value}\n" for setting in settings
    ]
    return "".join(lines)


def write_environment(cell: Cell, folder: Path) -> None:
    """Put into ``folder`` what the entrypoint and login shells set or compare with: defaults and profiles."""
    made_for = f"# what this image was made for\n{ACCELERATOR}={cell.accelerator.kind}\n"
    write(folder / "env", made_for + settings_file(cell.env))
    (folder / "profiles").mkdir(parents=True)
    for profile in cell.accelerator.profiles:
        write(folder / "profiles" / profile.name, settings_file(profile.env))


def labels(cell: Cell, base_tag: str, applied: Iterable[str]) -> dict[str, str]:
    """The OCI labels and our own, by name, without those that `Inputs` says of a build."""
    versions = {f"{NAMESPACE}.version.{name}": version for name, version in sorted(cell.versions.items())}
    return {
        "org.opencontainers.image.title": cell.tag,
        "org.opencontainers.image.description": "OpenRLHF on Ray and vLLM, tested on several nodes",
        "org.opencontainers.image.version": f"{cell.release}-{cell.id}",
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.base.name": base_tag,
        f"{NAMESPACE}.cell": cell.id,
        f"{NAMESPACE}.accelerator": cell.accelerator.kind,
        f"{NAMESPACE}.support.from": str(cell.support.since),
        f"{NAMESPACE}.support.until": str(cell.support.until),
        f"{NAMESPACE}.verified": cell.tested.verified,
        f"{NAMESPACE}.unverified": cell.tested.unverified,
        f"{NAMESPACE}.patches": " ".join(applied),
        **({f"{NAMESPACE}.stand-in": cell.stand_in} if cell.stand_in else {}),
        **versions,
    }


def repin(requirements: str, replacements: Mapping[str, str]) -> str:
    """A layer's requirements with the pins in ``replacements`` (``name==version`` to a new block)."""
    blocks = []
    for block in lockfile.blocks(requirements):
        pin = block.split()[0]
        blocks.append(replacements.get(pin, block))
    return "".join(blocks)


def pinned(wheel: Path) -> tuple[str, str]:
    """The pin that a patched wheel replaces, and the block that asks for exactly this wheel."""
    name, version = wheel.name.split("-")[:2]
    name = name.replace("_", "-")
    digest = rootfs.digest(wheel)
    return f"{name}=={version.split('+stack')[0]}", f"{name}=={version} \\\n    --hash=sha256:{digest}\n"


def local_wheels(requirements: str, folders: Iterable[Path]) -> list[Path]:
    """The wheels in ``folders``, which the build cannot see, that ``requirements`` name by hash."""
    found = []
    for block in lockfile.blocks(requirements):
        name = block.split("==")[0].replace("-", "_").lower()
        for wheel in (wheel for folder in folders for wheel in sorted(folder.glob("*.whl"))):
            if wheel.name.lower().startswith(f"{name}-") and rootfs.digest(wheel) in block:
                found.append(wheel)
    return found


def place(source: Path, target: Path) -> None:
    """Put a file into the context: a hard link where that works, because wheels are big."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)


def write(target: Path, text: str) -> None:
    """Write a file of the context."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def uv_binary() -> Path:
    """The uv of this environment, which the build uses too."""
    files = distribution("uv").files or []
    return next(Path(str(file.locate())) for file in files if file.name == "uv" and file.parent.name == "bin")


def with_option(cell: Cell, name: str) -> Cell:
    """The cell with an optional package in its highest layer, and its own tag; a `UserError` says why not."""
    option = next((option for option in cell.optional if option.name == name), None)
    if option is None:
        reason = next(
            (item.reason for item in cell.excluded if item.name == name), "the matrix has no such option"
        )
        raise UserError(f"{cell.id} cannot be built with {name}: {reason}")
    *lower, top = cell.layers
    build = SourceBuild(package=name, recipe=option.recipe, reason=option.reason, env=option.env)
    return msgspec.structs.replace(
        cell,
        tag=f"{cell.tag}-with-{name}",
        layers=(*lower, msgspec.structs.replace(top, packages=(*top.packages, name))),
        build_from_source=(*cell.build_from_source, build),
    )


def source_pin(cell: Cell, package: str, lock_text: str) -> str:
    """The pin, with hashes, of what a recipe builds: a package of the lock, or one of the cell's options."""
    for option in cell.optional:
        if option.name == package:
            return f"{option.name}=={option.version} \\\n    --hash=sha256:{option.sha256}\n"
    pin = f"{package}=={cell.versions[package]}"
    return next(block for block in lockfile.blocks(lock_text) if block.split()[0] == pin)


def place_beside(cell: Cell, layer: Layer, folder: Path) -> None:
    """Put the wheels of a layer that are unpacked beside the environment into ``folder/<where they go>``."""
    folder.mkdir(parents=True)
    for item in cell.side_by_side:
        if item.layer == layer.name:
            wheel = fetch_pristine(item.package, item.version, [item.sha256])
            place(wheel, folder / item.folder / wheel.name)


def place_sources(cell: Cell, layer: Layer, lock_text: str, folder: Path) -> None:
    """Put into ``folder`` what the source builds of a layer need: env, and recipes with their pin."""
    builds = [build for build in cell.build_from_source if build.package in layer.packages]
    settings = [f"{setting.name}='{setting.value}'" for build in builds for setting in build.env]
    write(folder / "env", "\n".join(settings) + "\n")
    for build in builds:
        if build.recipe:
            shutil.copytree(IMAGES / "sources" / build.recipe, folder / build.recipe)
            write(folder / build.recipe / "sdist.txt", source_pin(cell, build.package, lock_text))


def context(cell: Cell, config: PipConfig, contexts: Path = CONTEXTS) -> Path:
    """Lay out the build context of a cell, in a folder of ``contexts``."""
    folder = contexts / cell.id
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(IMAGES / "rootfs", folder / "rootfs")
    shutil.copytree(IMAGES / "tools", folder / "tools")
    place(uv_binary(), folder / "tools" / "uv")
    lock_file = lockfile.path(cell)
    lockfile.require(cell)
    patched = wheels.make_wheels(series_of(cell), lock_file, PATCHED)
    replacements = dict(pinned(wheel) for wheel in patched)
    lock_text = lock_file.read_text(encoding="utf-8")
    layers = lockfile.layers(lock_text, cell)
    texts = {name: repin(text, replacements) for name, text in layers.items()}
    for layer in cell.layers:
        (folder / "wheels" / layer.name).mkdir(parents=True)
        for wheel in local_wheels(texts[layer.name], [*config.find_links, PATCHED]):
            place(wheel, folder / "wheels" / layer.name / wheel.name)
        write(folder / "trim" / f"{layer.name}.txt", "".join(f"{t.action} {t.path}\n" for t in layer.trim))
        place_beside(cell, layer, folder / "beside" / layer.name)
        place_sources(cell, layer, lock_text, folder / "sources" / layer.name)
    runtime = next(wheel for wheel in patched if wheel.name.startswith("rlhf_stack-"))
    place(runtime, folder / "wheels" / "stack" / runtime.name)
    texts["stack"] = pinned(runtime)[1]
    write(folder / "trim" / "stack.txt", "")
    (folder / "beside" / "stack").mkdir(parents=True)
    for name, text in texts.items():
        write(folder / "requirements" / f"{name}.txt", text)
    pins = [block.split()[0] for text in texts.values() for block in lockfile.blocks(text)]
    write(folder / "etc" / "constraints.txt", "".join(f"{pin}\n" for pin in pins))
    shutil.copy(lock_file, folder / "etc" / "lock.txt")
    write(
        folder / "etc" / "cell.json", msgspec.json.format(msgspec.json.encode(cell), indent=2).decode() + "\n"
    )
    write_environment(cell, folder / "etc")
    write(folder / "Dockerfile", dockerfile(cell))
    return folder


def write_secrets(config: PipConfig, folder: Path) -> dict[str, Path]:
    """The secrets of a build by id, each with a mark by which a test looks for it in every layer."""
    texts = {"pip": config.portable()}
    if config.certificate:
        texts["ca"] = config.certificate.read_text(encoding="utf-8")
    secrets = {name: folder / name for name in texts}
    for name, path in secrets.items():
        path.write_text(f"{MARK}\n{texts[name]}", encoding="utf-8")
    return secrets


def toolchain(cell: Cell, builder: str) -> str:
    """The builder root with the vendor's compiler in it, where ``cell`` takes one from an image; its tag."""
    vendor = next((source.image for source in cell.sources if source.image), None)
    if vendor is None:
        return builder
    tag = f"{builder}-{hashlib.sha256(vendor.encode()).hexdigest()[:12]}"
    arguments = [f"--build-arg=BUILDER_BASE={builder}", f"--build-arg=VENDOR={vendor}", f"--tag={tag}"]
    done = subprocess.run(
        [*docker_command(), "build", *arguments, str(IMAGES / "vendor")],
        env={**os.environ, "DOCKER_BUILDKIT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError(f"the compiler of {vendor} cannot be taken: {done.stderr.strip().splitlines()[-1]}")
    return tag


@dataclass(frozen=True)
class Inputs:
    """All that decides what is in an image: the build context, the roots by their tags, and the labels."""

    folder: Path
    runtime: str
    builder: str
    labels: Mapping[str, str]

    @functools.cached_property
    def digest(self) -> str:
        """The sha256, in hex, of everything that goes into the build."""
        files = {
            str(path.relative_to(self.folder)): [rootfs.digest(path), os.access(path, os.X_OK)]
            for path in self.folder.rglob("*")
            if path.is_file()
        }
        given = {"files": files, "roots": [self.runtime, self.builder], "labels": self.labels}
        return hashlib.sha256(msgspec.json.encode(given, order="sorted")).hexdigest()

    def made(self, image: Image) -> bool:
        """Whether ``image`` was built from these, and not while a file of the checkout was uncommitted."""
        dirty = image.labels.get(REVISION, "").endswith(records.DIRTY)
        return image.labels.get(INPUTS) == self.digest and not dirty


def inputs(cell: Cell, config: PipConfig, contexts: Path = CONTEXTS) -> Inputs:
    """Lay out what a build of the cell is given, in a folder of ``contexts``."""
    runtime, builder = (rootfs.image(root) for root in rootfs.roots(cell))
    applied = [f"{s.package}/{p.name}" for s in series_of(cell) for p in s.patches]
    with exclusive_lock(PATCHED, "the laying out of another build"):  # all write the wheel of rlhf_stack there
        folder = context(cell, config, contexts)
    return Inputs(folder, runtime, toolchain(cell, builder), labels(cell, runtime, applied))


def command(given: Inputs, secrets: Mapping[str, Path], image_id: Path) -> list[str]:
    """The build command: BuildKit, no tag yet, and what the image is in labels."""
    marks = {**given.labels, REVISION: records.revision(), INPUTS: given.digest}
    return [
        *docker_command(),
        "build",
        "--progress=plain",
        f"--iidfile={image_id}",
        f"--build-arg=RUNTIME_BASE={given.runtime}",
        f"--build-arg=BUILDER_BASE={given.builder}",
        *(f"--secret=id={name},src={path}" for name, path in secrets.items()),
        *(f"--label={name}={value}" for name, value in marks.items()),
        str(given.folder),
    ]


def build(cell: Cell) -> str:
    """Build the cell and tag it; returns the image's id. A `UserError` says what failed; no tag moved then.

    An image that was built from the same inputs stays, and with it what was tested on it.
    """
    with _alone(cell):
        return _build(cell)


def digest(cell: Cell) -> str:
    """`Inputs.digest` of a build of the cell, as this checkout is."""
    with _alone(cell):
        return inputs(cell, index_config.load()).digest


def _alone(cell: Cell) -> AbstractContextManager[None]:
    return turn(CONTEXTS / "turns" / cell.id, f"a build of {cell.id}")


def size(image: Image) -> int:
    """Bytes of all layers, unpacked: what ``docker image ls`` shows where images are not kept compressed."""
    return sum(layer["Size"] for layer in image.history())


def _build(cell: Cell) -> str:
    config = index_config.load()
    client = connect()
    preflight.require(cell, client)
    before = client.images.list(name=cell.tag)
    check_space(ROOT, CONTEXT_MEGABYTES, shutil.disk_usage(ROOT).free)
    given = inputs(cell, config)
    if before and given.made(before[0]):
        return str(before[0].id)
    need_space(REBUILD_MEGABYTES if before else BUILD_MEGABYTES)
    with tempfile.TemporaryDirectory() as temporary:
        secrets = write_secrets(config, Path(temporary))
        image_id = Path(temporary, "image")
        log = CONTEXTS / f"{cell.id}.log"
        if _follow(command(given, secrets, image_id), log):
            cause = build_log.cause(log.read_text(encoding="utf-8"))
            raise UserError(f"building {cell.id} failed: {cause} (all of it: {log.relative_to(ROOT)})")
        built = image_id.read_text().strip()
    client.images.get(built).tag(cell.tag)
    for image in before:
        if image.id != built:
            with contextlib.suppress(docker.errors.APIError):  # a container or another tag still uses it
                client.images.remove(str(image.id))
    return built


def _follow(arguments: list[str], log: Path) -> int:
    """Run a build command; its output goes to ``log``, what it is at is shown."""
    environment = {**os.environ, "DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    console = Console()
    with log.open("w", encoding="utf-8") as file, console.status("preparing") as status:
        process = subprocess.Popen(
            arguments,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        try:
            for stage in build_log.stages(_copied(process.stderr or (), file)):
                status.update(f"building {stage.name}")
                if stage.seconds is not None and stage.seconds >= SHOWN_SECONDS:
                    console.print(f"  {stage.name}: {stage.seconds:.0f} s")
        except BaseException:
            process.terminate()
            raise
        finally:
            code = process.wait()
        return code


def _copied(lines: Iterable[str], file: TextIO) -> Iterator[str]:
    for line in lines:
        file.write(line)
        yield line


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.images.image_build", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("cell", nargs="?", help="a cell id; the default cell if none is given")
    parser.add_argument(
        "--stand-in",
        action="store_true",
        help="for tests: build what stands in for a cell whose packages cannot be had here",
    )
    parser.add_argument(
        "--with", metavar="NAME", action="append", default=[], help="add an optional package of the cell"
    )
    matrix, options = load(), vars(parser.parse_args())
    name = options["cell"] or matrix.default
    cell = find(matrix, name + STAND_IN if options["stand_in"] else name)
    cell = functools.reduce(with_option, options["with"], cell)
    built = build(cell)
    image = connect().images.get(built)
    print(f"{cell.tag}  {size(image) / 1e6:.0f} MB  {built}")
    return 0


if __name__ == "__main__":
    run(with_docker_errors(main))
