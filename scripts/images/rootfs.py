"""Root filesystems of images, from Debian packages: a *runtime* root, and a *builder* root with compilers.

The same package versions give a bit-identical tar: mmdebstrap uses ``SOURCE_DATE_EPOCH``, and
``images/base/customize.sh`` removes what differs between machines.
"""

import inspect
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.digests import sha256, sha256_file
from scripts.docker import bootstrap
from scripts.docker.client import connect, docker_command
from scripts.errors import UserError
from scripts.matrix.load import Base, Cell
from scripts.paths import ROOT

CUSTOMIZE = ROOT / "images" / "base" / "customize.sh"
DOWNLOADS = ROOT / "build" / "base"
REPOSITORY = "rlhf-stacks-base"
MERGED_USR = Path("/usr/share/mmdebstrap/hooks/merged-usr")
UNUSED_PATHS = ("/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/man/*")
# Other variables of the caller would change the result: the scripts of Debian's packages obey, for example,
# PYTHONDONTWRITEBYTECODE.
PASSED_ON = {"path", "home", "tmpdir", "apt_config", "http_proxy", "https_proxy", "no_proxy"}


@dataclass(frozen=True)
class Root:
    """A root filesystem: ``packages`` of ``base``, with ``epoch`` (seconds) as the date of every file."""

    name: str
    base: Base
    packages: tuple[str, ...]
    epoch: int

    @property
    def recipe(self) -> str:
        """A digest of all that determines the content, except the versions on the Debian mirror."""
        parts = [self.name, self.epoch, *command(self, Path("root.tar")), inspect.getsource(normalise)]
        return sha256(json.dumps(parts))[:12]

    @property
    def tar(self) -> Path:
        """The path of the tar."""
        return DOWNLOADS / f"{self.name}-{self.recipe}.tar"


def roots(cell: Cell) -> tuple[Root, Root]:
    """Return the runtime root and the builder root of a cell."""
    base = cell.base
    runtime = tuple(package.name for package in base.runtime)
    builder = runtime + tuple(package.name for package in base.builder)
    return (
        Root(base.name, base, runtime, cell.source_date_epoch),
        Root(f"{base.name}-builder", base, builder, cell.source_date_epoch),
    )


def command(root: Root, tar: Path) -> list[str]:
    """Return the mmdebstrap command that writes ``root`` to ``tar``."""
    unused = [f"--dpkgopt=path-exclude={path}" for path in UNUSED_PATHS]
    return [
        "mmdebstrap",
        "--quiet",
        "--variant=minbase",
        f"--architectures={root.base.architecture}",
        '--aptopt=APT::Install-Recommends "false"',
        *unused,
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        # Without it mmdebstrap needs gpg on Ubuntu, and writes the path of the key into the root.
        f"--keyring={bootstrap.KEYRING}",
        f"--hook-dir={MERGED_USR}",
        f"--include={','.join(root.packages)}",
        # Its text, not its path: a user's mmdebstrap runs hooks as an id without access to the user's home.
        f"--customize-hook=# {CUSTOMIZE.relative_to(ROOT)}\n{CUSTOMIZE.read_text(encoding='utf-8')}",
        root.base.suite,
        str(tar),
    ]


def make(root: Root, tar: Path) -> None:
    """Write ``root`` to ``tar``; a failure leaves no file."""
    if shutil.which("mmdebstrap") is None:
        raise UserError("mmdebstrap is missing: apt-get install mmdebstrap debian-archive-keyring")
    tar.parent.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name.lower() in PASSED_ON}
    environment |= {"SOURCE_DATE_EPOCH": str(root.epoch), "LC_ALL": "C.UTF-8"}
    with tempfile.TemporaryDirectory(dir=tar.parent) as folder:
        unfinished = Path(folder, tar.name)
        code, errors = _run_until_cleaned_up(command(root, unfinished), environment)
        if code:
            raise UserError(f"mmdebstrap failed for {root.name}: {reason(errors)}")
        normalised = Path(folder, "normalised.tar")
        normalise(unfinished, normalised, root.epoch)
        normalised.rename(tar)


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
    if any(text in output for text in ("Could not resolve", "Could not connect", "Failed to fetch")):
        return f"{cause} (the Debian mirror is unreachable: check the network and apt's proxy)"
    if "unable to pick chroot mode" in output:
        return (
            f"{cause} (a user needs the package uidmap, a line in /etc/subuid, and a line in /etc/subgid for "
            "the login group: log in again instead of using newgrp or sg, or run it as root)"
        )
    if "No space left" in output:
        return f"{cause} (free some space under {DOWNLOADS.relative_to(ROOT)} and in the temporary directory)"
    return cause


def image(root: Root) -> str:
    """Return the local tag of the root's image, by content; build and import the root if it is missing."""
    if not root.tar.exists():
        print(f"building {root.name} from Debian packages (about half a minute)", flush=True)
        make(root, root.tar)
    tag = f"{REPOSITORY}:{root.name}-{sha256_file(root.tar)[:12]}"
    if not connect().images.list(name=tag):
        done = subprocess.run(
            [*docker_command(), "import", str(root.tar), tag], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(f"docker cannot import {root.tar.relative_to(ROOT)}: {done.stderr.strip()}")
    return tag
