"""Build the image of a cell with BuildKit; the tag moves only after the whole build has succeeded."""

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import docker
import docker.errors
from docker.models.images import Image
from rich.console import Console

from scripts import git
from scripts.docker.client import build_environment, check_space, connect, docker_command, need_space
from scripts.errors import UserError
from scripts.images import build_log
from scripts.images.context import CONTEXTS
from scripts.images.inputs import INPUTS, REVISION, Inputs, build_lock, collect
from scripts.locks import index_config, preflight
from scripts.locks.index_config import PipConfig
from scripts.matrix.load import Cell
from scripts.paths import ROOT

CLIENT = "/run/secrets/client"  # for pip; install-layer passes it to uv
LEAK_MARKER = "# rlhf-stacks: a secret of the build, in no layer of an image"
# Relative to the layers of an image: uv's cache has their packages once more (measured: 8.5 GB for two
# images of 8.8 GB), and containerd's image store the packed layers.
CACHE, PACKED = 1.0, 0.5
ROOTS_MEGABYTES = 2000  # root filesystems and what is compiled
SHOWN_SECONDS = 1.0


def build(cell: Cell) -> str:
    """Build and tag a cell's image and return its id; `UserError` names what failed.

    An existing image that was built from the same inputs is reused, and its test records remain valid.
    """
    with build_lock(cell):
        return _build(cell)


@dataclass(frozen=True)
class Space:
    """What a build needs, in 10^6 bytes: below the checkout, and where Docker stores images."""

    checkout: int
    docker: int


def space(cell: Cell, exists: bool) -> Space:
    """Return the space for a build of the cell, from its size budget; less if there is an image of it."""
    layers = cell.size_budget_mb
    factor = 1 if exists else 1 + CACHE + PACKED
    fixed = ROOTS_MEGABYTES // 4 if exists else ROOTS_MEGABYTES
    return Space(checkout=ROOTS_MEGABYTES + layers // 4, docker=round(factor * layers) + fixed)


def unpacked_size(image: Image) -> int:
    """Return the bytes of all layers, unpacked, as ``docker image ls`` shows them for Docker's own store."""
    return sum(layer["Size"] for layer in image.history())


def write_secrets(config: PipConfig, folder: Path) -> dict[str, Path]:
    """Write the secrets of a build and return them by id; a test searches every layer for `LEAK_MARKER`."""
    contents = {"pip": config.portable().encode()}
    if config.certificate:
        contents["ca"] = config.certificate.read_bytes()
    if config.client:
        contents["pip"] += f"client-cert = {CLIENT}\n".encode()
        contents["client"] = config.client.read_bytes()
    secrets = {name: folder / name for name in contents}
    for name, path in secrets.items():
        path.write_bytes(f"{LEAK_MARKER}\n".encode() + contents[name])
    return secrets


def build_command(
    inputs: Inputs, secrets: Mapping[str, Path], image_id: Path, proxies: Iterable[str] = ()
) -> list[str]:
    """Return the build command, which sets labels but no tag and writes the image's id to a file.

    The values of ``proxies``, which are names of variables, are in the environment of the command.
    """
    labels = {**inputs.labels, REVISION: git.revision(), INPUTS: inputs.digest}
    return [
        *docker_command(),
        "build",
        "--progress=plain",
        f"--iidfile={image_id}",
        f"--build-arg=RUNTIME_BASE={inputs.runtime}",
        f"--build-arg=BUILDER_BASE={inputs.builder}",
        f"--build-arg=INPUTS={inputs.digest}",
        *(f"--build-arg={name}" for name in proxies),
        *(f"--secret=id={name},src={path}" for name, path in secrets.items()),
        *(f"--label={name}={value}" for name, value in labels.items()),
        str(inputs.folder),
    ]


def _build(cell: Cell) -> str:
    config = index_config.load()
    client = connect()
    preflight.require(cell, client)
    before = _local(client, cell.tag)
    needed = space(cell, before is not None)
    check_space(ROOT, needed.checkout, shutil.disk_usage(ROOT).free)
    inputs = collect(cell, config)
    if before and inputs.matches(before):
        return str(before.id)
    for line in config.unsupported:
        print(f"warning: the build does not use a setting of pip's configuration: {line}", file=sys.stderr)
    need_space(needed.docker)
    with tempfile.TemporaryDirectory() as temporary:
        secrets = write_secrets(config, Path(temporary))
        image_id = Path(temporary, "image")
        log = CONTEXTS / f"{cell.id}.log"
        if _run(build_command(inputs, secrets, image_id, config.proxies), log, config.environment()):
            cause = build_log.cause(log.read_text(encoding="utf-8"))
            raise UserError(f"building {cell.id} failed: {cause} (full log: {log.relative_to(ROOT)})")
        built = image_id.read_text().strip()
    client.images.get(built).tag(cell.tag)
    remove_unnamed(client, [str(before.id)] if before else [])
    return built


def _local(client: docker.DockerClient, tag: str) -> Image | None:
    try:
        return client.images.get(tag)
    except docker.errors.ImageNotFound:
        return None


def remove_unnamed(client: docker.DockerClient, images: Iterable[str]) -> None:
    """Remove images that no tag names and no container uses; a tested image has a tag (`testing.kept`)."""
    for image in images:
        with contextlib.suppress(docker.errors.APIError):  # a container uses it, or it is gone
            if not client.images.get(image).tags:
                client.images.remove(image)


def _run(arguments: list[str], log: Path, environment: Mapping[str, str]) -> int:
    """Run a build command and return its exit code; log its output and show the current stage."""
    console = Console()
    with log.open("w", encoding="utf-8") as file, console.status("preparing") as status:
        process = subprocess.Popen(
            arguments,
            env=build_environment(environment),
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
