"""Root filesystems of images, from Debian packages: a *runtime* root, and a *builder* root with compilers.

mmdebstrap installs the locked packages, from a repository that contains no other one. They give a
bit-identical tar: mmdebstrap uses ``SOURCE_DATE_EPOCH``, and ``images/base/customize.sh`` removes what
differs between machines.
"""

import inspect
import json
import os
import shlex
import shutil
import signal
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.digests import sha256, sha256_file
from scripts.docker.client import connect, docker_command
from scripts.errors import UserError
from scripts.images import repository
from scripts.locking import exclusive_lock
from scripts.locks import debian, targets
from scripts.locks.debian import BUILDER, RUNTIME, UNPACKED, Deb
from scripts.matrix.load import Cell, Matrix, load
from scripts.matrix.model import Base, Toolchain, named
from scripts.paths import ROOT
from scripts.processes import captured

HIP = ROOT / "images" / "base" / "hip.sh"
CUSTOMIZE = ROOT / "images" / "base" / "customize.sh"
DOWNLOADS = ROOT / "build" / "base"
PACKAGES = DOWNLOADS / "packages"
MANIFEST = "./etc/rlhf-stack-base.txt"  # written by `CUSTOMIZE`
REPOSITORY = "rlhf-stacks-base"
MERGED_USR = Path("/usr/share/mmdebstrap/hooks/merged-usr")
UNUSED_PATHS = ("/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/man/*")
# Other variables of the caller would change the result: the scripts of Debian's packages obey, for example,
# PYTHONDONTWRITEBYTECODE.
PASSED_ON = {"path", "home", "tmpdir", "apt_config"}


@dataclass(frozen=True)
class Root:
    """A root filesystem with ``packages`` and what they require, all of which is in ``locked``.

    ``epoch`` (seconds) is the date of every file. A toolchain has the files of ``unpacked`` too.
    """

    name: str
    base: Base
    packages: tuple[str, ...]
    locked: tuple[Deb, ...]
    epoch: int
    unpacked: tuple[Deb, ...] = ()

    @property
    def recipe(self) -> str:
        """A digest of all that determines the content."""
        locked = [(deb.name, deb.version, deb.sha256) for deb in (*self.locked, *self.unpacked)]
        options = command(self, Path("root.tar"), Path("repository"))
        parts = [self.name, self.epoch, locked, options, inspect.getsource(normalise)]
        return sha256(json.dumps(parts))[:12]

    @property
    def tar(self) -> Path:
        """The path of the tar."""
        return DOWNLOADS / f"{self.name}-{self.recipe}.tar"


def roots(cell: Cell) -> tuple[Root, Root]:
    """Return the runtime root and the builder root of a cell; `UserError` if their lock is out of date."""
    matrix, base = load(), cell.base
    declared = named(matrix.bases, base.name)
    runtime = tuple(package.name for package in base.runtime)
    builder = runtime + tuple(package.name for package in base.builder)
    largest = next(root for root, names in debian.roots(matrix, declared).items() if names == builder)
    locked = [deb for deb in targets.locked_debs(matrix, declared) if deb.root in (RUNTIME, BUILDER, largest)]
    shared = tuple(deb for deb in locked if deb.root == RUNTIME)
    return (
        Root(base.name, base, runtime, shared, cell.source_date_epoch),
        Root(f"{base.name}-{BUILDER}", base, builder, tuple(locked), cell.source_date_epoch),
    )


def toolchain(matrix: Matrix, declared: Toolchain) -> Root:
    """Return the root of a toolchain; `UserError` if its lock is out of date."""
    debs = targets.locked_debs(matrix, declared)
    return Root(
        declared.name,
        declared,
        tuple(package.name for package in declared.runtime),
        tuple(deb for deb in debs if deb.root == RUNTIME),
        matrix.source_date_epoch,
        tuple(deb for deb in debs if deb.root == UNPACKED),
    )


def command(root: Root, tar: Path, packages: Path) -> list[str]:
    """Return the mmdebstrap command that writes ``root`` to ``tar`` from the repository in ``packages``."""
    unused = [f"--dpkgopt=path-exclude={path}" for path in UNUSED_PATHS]
    return [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        f"--architectures={root.base.architecture}",
        '--aptopt=APT::Install-Recommends "false"',
        *unused,
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        f"--hook-dir={MERGED_USR}",
        f"--include={','.join(('apt', *root.packages))}",
        # Its text, not its path: a user's mmdebstrap runs hooks as an id without access to the user's home.
        f"--customize-hook=# {CUSTOMIZE.relative_to(ROOT)}\n{CUSTOMIZE.read_text(encoding='utf-8')}",
        *(
            f'--customize-hook=dpkg-deb --extract {shlex.quote(str(packages / deb.file))} "$1"'
            for deb in root.unpacked
        ),
        *([f"--customize-hook={HIP.read_text(encoding='utf-8')}"] if root.unpacked else []),
        f"--customize-hook=printf %s '{debian.sources(root.base)}' >\"$1/etc/apt/sources.list\"",
        root.base.suite,
        str(tar),
        f"deb [trusted=yes] copy:{packages} ./",  # each package has the sha256 of the lock
    ]


def make(root: Root, tar: Path) -> None:
    """Write ``root`` to ``tar``; a failure leaves no file."""
    if shutil.which("mmdebstrap") is None:
        raise UserError("mmdebstrap is missing: apt-get install mmdebstrap")
    tar.parent.mkdir(parents=True, exist_ok=True)
    relock = f"{targets.COMMAND} {root.base.name}"
    debs = (*root.locked, *root.unpacked)
    repository.fetch(debs, PACKAGES, relock)
    environment = {name: value for name, value in os.environ.items() if name.lower() in PASSED_ON}
    environment |= {"SOURCE_DATE_EPOCH": str(root.epoch), "LC_ALL": "C.UTF-8"}
    # The repository is not below this checkout: a user's mmdebstrap has no access to the user's home.
    with tempfile.TemporaryDirectory(dir=tar.parent) as folder, tempfile.TemporaryDirectory() as packages:
        repository.write(debs, root.base.suite, PACKAGES, Path(packages))
        unfinished = Path(folder, tar.name)
        code, errors = _run_until_cleaned_up(command(root, unfinished, Path(packages)), environment)
        if code:
            raise UserError(f"mmdebstrap failed for {root.name}: {reason(errors)}")
        if differing := sorted({f"{deb.name}={deb.version}" for deb in root.locked} ^ installed(unfinished)):
            raise UserError(f"{root.name} and its lock differ in {', '.join(differing[:3])}: run {relock}")
        normalised = Path(folder, "normalised.tar")
        normalise(unfinished, normalised, root.epoch)
        normalised.rename(tar)


def installed(tar: Path) -> set[str]:
    """Return the packages that are installed in a root, each as ``name=version``."""
    with tarfile.open(tar) as archive:
        file = archive.extractfile(MANIFEST)
        return set(file.read().decode().split()) if file else set()


def _run_until_cleaned_up(arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run a command and return exit code and errors; interrupted, wait until it has removed its files."""
    with subprocess.Popen(
        arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, umask=0o022
    ) as process:
        try:
            _, errors = process.communicate()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    return process.returncode, errors


def normalise(source: Path, target: Path, epoch: int) -> None:
    """Rewrite a tar without differences between releases of the tools that wrote it.

    Releases of GNU tar fill headers differently. Releases of mmdebstrap unpack packages in different orders,
    which changes the date of a folder that several packages own.
    """
    with tarfile.open(source) as old, tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as new:
        for member in old:
            if member.isdir():
                member.mtime = epoch
            new.addfile(member, old.extractfile(member) if member.isreg() else None)


def reason(output: str) -> str:
    """Return the error line of mmdebstrap's output, with a remedy if one is known."""
    lines = [line.strip() for line in output.splitlines() if line.startswith(("E:", "W: Failed"))]
    cause = lines[0] if lines else "no error message"
    if "unable to pick chroot mode" in output:
        return (
            f"{cause} (a user needs the package uidmap and subordinate ids: `sudo usermod --add-subuids "
            "100000-165535 --add-subgids 100000-165535 $USER`; then log in again, not with newgrp or sg)"
        )
    if "No space left" in output:
        return f"{cause} (free some space under {DOWNLOADS.relative_to(ROOT)} and in the temporary directory)"
    return cause


def tag(root: Root, digest: str) -> str:
    """Return the local tag of the image of a root whose tar has the sha256 ``digest``."""
    return f"{REPOSITORY}:{root.name}-{digest[:12]}"


def image(root: Root) -> str:
    """Return the local tag of the root's image, by content; build and import the root if it is missing."""
    with exclusive_lock(DOWNLOADS, "a build of root filesystems"):
        if not root.tar.exists():
            print(f"building {root.name} from Debian packages (about half a minute)", flush=True)
            make(root, root.tar)
    name = tag(root, sha256_file(root.tar))
    if not connect().images.list(name=name):
        done = captured([*docker_command(), "import", str(root.tar), name])
        if done.returncode:
            raise UserError(f"docker cannot import {root.tar.relative_to(ROOT)}: {done.stderr.strip()}")
    return name
