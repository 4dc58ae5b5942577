"""Make the root filesystems that images start from, out of Debian packages alone.

``python -m scripts.images.rootfs [CELL ...] [--refresh]``: a *runtime* root, and a *builder* root that adds compilers.
The same package versions give a bit-identical tar: mmdebstrap with ``SOURCE_DATE_EPOCH``, and
``images/base/customize.sh`` removes what differs from machine to machine.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.docker import bootstrap
from scripts.docker.client import connect, docker_command, with_docker_errors
from scripts.errors import UserError, run
from scripts.matrix.load import Base, Cell, find, load
from scripts.paths import ROOT

CUSTOMIZE = ROOT / "images" / "base" / "customize.sh"
DOWNLOADS = ROOT / "build" / "base"
REPOSITORY = "rlhf-stacks-base"
MERGED_USR = Path("/usr/share/mmdebstrap/hooks/merged-usr")
UNUSED_PATHS = ("/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/man/*")
# A caller's other variables would get into the result: PYTHONDONTWRITEBYTECODE, for one, is obeyed by the
# scripts that Debian's packages run.
PASSED_ON = {"path", "home", "tmpdir", "apt_config", "http_proxy", "https_proxy", "no_proxy"}
# Raised when the way in which a root is written changes, so that one written before is made again.
WRITTEN = 2


@dataclass(frozen=True)
class Root:
    """One root filesystem to make: ``packages`` of ``base``, every file dated ``epoch`` (seconds)."""

    name: str
    base: Base
    packages: tuple[str, ...]
    epoch: int

    @property
    def recipe(self) -> str:
        """A digest of all that decides the content, but for the versions that Debian has today."""
        parts = [WRITTEN, self.name, self.base.suite, self.base.architecture, self.packages, self.epoch]
        return hashlib.sha256(json.dumps(parts).encode() + CUSTOMIZE.read_bytes()).hexdigest()[:12]

    @property
    def tar(self) -> Path:
        """Where the tar is kept."""
        return DOWNLOADS / f"{self.name}-{self.recipe}.tar"


def roots(cell: Cell) -> tuple[Root, Root]:
    """The runtime root and the builder root of a cell."""
    base = cell.base
    runtime = tuple(package.name for package in base.runtime)
    builder = runtime + tuple(package.name for package in base.builder)
    return (
        Root(base.name, base, runtime, cell.source_date_epoch),
        Root(f"{base.name}-builder", base, builder, cell.source_date_epoch),
    )


def command(root: Root, tar: Path) -> list[str]:
    """The mmdebstrap command that writes ``root`` to ``tar``."""
    unused = [f"--dpkgopt=path-exclude={path}" for path in UNUSED_PATHS]
    return [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        f"--architectures={root.base.architecture}",
        '--aptopt=APT::Install-Recommends "false"',
        *unused,
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        # Else on Ubuntu it depends on gpg, and where that is, the path of the key is written into the root.
        f"--keyring={bootstrap.KEYRING}",
        f"--hook-dir={MERGED_USR}",
        f"--include={','.join(root.packages)}",
        # Its text, not its path: a user's mmdebstrap runs hooks as an id that may not enter the user's home.
        f"--customize-hook=# {CUSTOMIZE.relative_to(ROOT)}\n{CUSTOMIZE.read_text(encoding='utf-8')}",
        root.base.suite,
        str(tar),
    ]


def make(root: Root, tar: Path) -> None:
    """Write ``root`` to ``tar``; nothing is left there if it fails."""
    if shutil.which("mmdebstrap") is None:
        raise UserError("mmdebstrap is missing: apt-get install mmdebstrap debian-archive-keyring")
    tar.parent.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name.lower() in PASSED_ON}
    environment |= {"SOURCE_DATE_EPOCH": str(root.epoch), "LC_ALL": "C.UTF-8"}
    with tempfile.TemporaryDirectory(dir=tar.parent) as folder:
        unfinished = Path(folder, tar.name)
        code, errors = _run_to_its_end(command(root, unfinished), environment)
        if code:
            raise UserError(f"mmdebstrap failed for {root.name}: {reason(errors)}")
        normalised = Path(folder, "normalised.tar")
        normalise(unfinished, normalised, root.epoch)
        normalised.rename(tar)


def _run_to_its_end(arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and errors of a command; interrupted, it has the time to remove what it unpacked."""
    with subprocess.Popen(
        arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            _, errors = process.communicate()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
    return process.returncode, errors


def normalise(source: Path, target: Path, epoch: int) -> None:
    """Write ``source`` anew without what is of the tools that made it.

    GNU tar's releases differ in how they fill a header, mmdebstrap's in the order in which packages are
    unpacked, which dates a folder that several packages own.
    """
    with tarfile.open(source) as old, tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as new:
        for member in old:
            if member.isdir():
                member.mtime = epoch
            new.addfile(member, old.extractfile(member) if member.isreg() else None)


def reason(output: str) -> str:
    """The telling line of mmdebstrap's output, with what to do where that is known."""
    lines = [line.strip() for line in output.splitlines() if line.startswith(("E:", "W: Failed"))]
    cause = lines[0] if lines else "no error message"
    if any(text in output for text in ("Could not resolve", "Could not connect", "Failed to fetch")):
        return f"{cause} (the Debian mirror cannot be reached: check the network and apt's proxy)"
    if "unable to pick chroot mode" in output:
        return (
            f"{cause} (a user needs the package uidmap and a line each in /etc/subuid and, for the group at "
            "login, /etc/subgid: log in again instead of using newgrp or sg, or run it as root)"
        )
    if "No space left" in output:
        return f"{cause} (free some space under {DOWNLOADS.relative_to(ROOT)} and in the temporary directory)"
    return cause


def digest(tar: Path) -> str:
    """The sha256 of a file, in hex."""
    with tar.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def image(root: Root) -> str:
    """The local tag of the root's image, by content; made and imported where it is not there yet."""
    if not root.tar.exists():
        print(f"making {root.name} from Debian packages (about half a minute)", flush=True)
        make(root, root.tar)
    tag = f"{REPOSITORY}:{root.name}-{digest(root.tar)[:12]}"
    if not connect().images.list(name=tag):
        done = subprocess.run(
            [*docker_command(), "import", str(root.tar), tag], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(f"docker cannot import {root.tar.relative_to(ROOT)}: {done.stderr.strip()}")
    return tag


def main() -> int:
    """Make and import the roots of the cells named, or of the default cell."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.images.rootfs", description=__doc__.split("\n")[0] if __doc__ else ""
    )
    parser.add_argument("cell", nargs="*", help="cell ids; the default cell if none is given")
    parser.add_argument(
        "--refresh", action="store_true", help="make them again with the packages Debian has today"
    )
    arguments = parser.parse_args()
    matrix = load()
    names = arguments.cell or [matrix.default]
    wanted = {root for name in names for root in roots(find(matrix, name))}
    for root in sorted(wanted, key=lambda root: root.name):
        if arguments.refresh:
            root.tar.unlink(missing_ok=True)
        tag = image(root)
        print(f"{tag}  {root.tar.stat().st_size / 1e6:.0f} MB  sha256:{digest(root.tar)}")
    return 0


if __name__ == "__main__":
    run(with_docker_errors(main))
