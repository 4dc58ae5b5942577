"""The inputs of a build, and their digest: the same digest means the same content of an image."""

import functools
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import docker.errors
import msgspec
from docker.models.images import Image

from scripts.digests import sha256, sha256_file
from scripts.docker.client import build_environment, connect, docker_command
from scripts.errors import UserError
from scripts.git import DIRTY
from scripts.images import rootfs
from scripts.images.context import CONTEXTS, IMAGES, PATCHED, lay_out
from scripts.locking import exclusive_lock
from scripts.locks import index_config
from scripts.locks.index_config import PipConfig
from scripts.matrix.load import Cell
from scripts.patches.series import series_of
from scripts.patches.wheel_files import split_name
from scripts.processes import captured

NAMESPACE = "io.rlhf-stacks"
INPUTS = f"{NAMESPACE}.inputs"  # the label with `Inputs.digest`
PULL_SECONDS = 600  # without progress of Docker
REVISION = "org.opencontainers.image.revision"


@dataclass(frozen=True)
class Inputs:
    """The build context, the tags of the root filesystems, and the labels."""

    folder: Path
    runtime: str
    builder: str
    labels: Mapping[str, str]

    @functools.cached_property
    def digest(self) -> str:
        """The sha256, in hex, of all inputs: of files, folders and links the path, type, mode and content."""
        paths = {path.relative_to(self.folder): path for path in self.folder.rglob("*")}
        files = {str(name): _entry(path) for name, path in paths.items() if not _is_pinned_wheel(name)}
        everything = {"files": files, "roots": [self.runtime, self.builder], "labels": self.labels}
        return sha256(msgspec.json.encode(everything, order="sorted"))

    def matches(self, image: Image) -> bool:
        """Return whether ``image`` was built from these inputs, in a checkout without uncommitted files."""
        dirty = image.labels.get(REVISION, "").endswith(DIRTY)
        return image.labels.get(INPUTS) == self.digest and not dirty


def _is_pinned_wheel(name: Path) -> bool:
    """Whether a file is a wheel of the index from the user's folder of wheels: requirements have its hash."""
    folder, *layer = name.parts[:2]
    is_wheel = folder == "wheels" and name.suffix == ".whl" and layer != ["stack"]
    return is_wheel and "+" not in split_name(name.name)[1]


def _entry(path: Path) -> list[str]:
    """Return the type, the mode in octal, and the sha256 of a file or the target of a link."""
    if path.is_symlink():
        return ["link", "", str(path.readlink())]
    mode = f"{stat.S_IMODE(path.stat().st_mode):o}"
    return ["folder", mode, ""] if path.is_dir() else ["file", mode, sha256_file(path)]


def collect(cell: Cell, config: PipConfig, contexts: Path = CONTEXTS) -> Inputs:
    """Lay out the build context in a folder of ``contexts`` and return the inputs of a build."""
    runtime, builder = (rootfs.image(root) for root in rootfs.roots(cell))
    applied = [f"{s.package}/{p.name}" for s in series_of(cell) for p in s.patches]
    with exclusive_lock(PATCHED, "the layout of another build"):  # each writes rlhf_stack's wheel there
        folder = lay_out(cell, config, contexts)
    return Inputs(folder, runtime, with_vendor_compiler(cell, builder), image_labels(cell, runtime, applied))


def digest_for(cell: Cell) -> str:
    """Return `Inputs.digest` of a build of the cell from the current checkout."""
    with build_lock(cell):
        return collect(cell, index_config.load()).digest


def build_lock(cell: Cell) -> AbstractContextManager[None]:
    """Return a lock on the cell's folder of `CONTEXTS`."""
    return exclusive_lock(CONTEXTS / "locks" / cell.id, f"a build of {cell.id}")


def image_labels(cell: Cell, base_tag: str, applied: Iterable[str]) -> dict[str, str]:
    """Return the labels of an image, without `REVISION` and `INPUTS`; ``applied`` are names of patches."""
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


def with_vendor_compiler(cell: Cell, builder: str) -> str:
    """Return the tag of the builder root, with the vendor's compiler if the cell takes it from an image."""
    vendor = next((source.image for source in cell.sources if source.image), None)
    if vendor is None:
        return builder
    recipe = (IMAGES / "vendor" / "Dockerfile").read_text(encoding="utf-8")
    tag = f"{builder}-{sha256(vendor_digest(vendor) + recipe)[:12]}"
    arguments = [f"--build-arg=BUILDER_BASE={builder}", f"--build-arg=VENDOR={vendor}", f"--tag={tag}"]
    command = [*docker_command(), "build", *arguments, str(IMAGES / "vendor")]
    done = captured(command, env=build_environment(os.environ))
    if done.returncode:
        error = done.stderr.strip().splitlines()[-1]
        raise UserError(f"the compiler of {vendor} cannot be copied to the builder: {error}")
    return tag


def vendor_digest(vendor: str) -> str:
    """Return the digest of a vendor's image, which is pulled if it is missing: its tag may move.

    It is that of the registry, or the image's id if the image came from none, so that machines agree.
    """
    images = connect(PULL_SECONDS).images
    try:
        image = images.get(vendor)
    except docker.errors.ImageNotFound:
        image = images.pull(vendor)
    repository = vendor.rpartition(":")[0]
    digests = dict(name.split("@") for name in image.attrs.get("RepoDigests") or [])
    return str(digests.get(repository, image.id))
