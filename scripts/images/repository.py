"""An apt repository with exactly the locked Debian packages of a root, from which mmdebstrap installs."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import unquote

from scripts.digests import sha256, sha256_file
from scripts.errors import UserError
from scripts.locks.debian import Deb

HELPER = "/usr/lib/apt/apt-helper"  # of the package apt: uses apt's proxy
RETRIES = 3
GONE = "  404 "  # between address and reason in apt's error


def write(debs: Sequence[Deb], suite: str, cache: Path, folder: Path) -> None:
    """Write a repository of ``debs``, which are in ``cache``, to ``folder``, readable for every user."""
    index = "\n".join(_stanza(deb, cache / deb.file) for deb in debs)
    release = f"Codename: {suite}\nSHA256:\n {sha256(index)} {len(index.encode())} Packages\n"
    (folder / "Packages").write_text(index, encoding="utf-8")
    (folder / "Release").write_text(release, encoding="utf-8")
    for deb in debs:
        shutil.copyfile(cache / deb.file, folder / deb.file)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)


def fetch(debs: Iterable[Deb], cache: Path, relock: str) -> None:
    """Download the packages that ``cache`` lacks, and verify the sha256 of all.

    `UserError` names the first package that is unavailable; if Debian's archive no longer has it, also
    ``relock``, the command that locks newer versions.
    """
    cache.mkdir(parents=True, exist_ok=True)
    lacking = [deb for deb in debs if not _is_valid(cache / deb.file, deb)]
    if not lacking:
        return
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        folder = Path(temporary)
        errors = _download(lacking, folder)
        arrived = [deb for deb in lacking if _is_valid(folder / deb.file, deb)]
        for deb in arrived:
            (folder / deb.file).replace(cache / deb.file)
    if missing := [deb for deb in lacking if deb not in arrived]:
        raise UserError(_explain(missing, errors, relock))


def _download(debs: Iterable[Deb], folder: Path) -> str:
    """Download what can be downloaded, in parallel, and return the errors."""
    options = ("--quiet", "--quiet", "-o=APT::Sandbox::User=root", f"-o=Acquire::Retries={RETRIES}")
    words = [word for deb in debs for word in (deb.url, str(folder / deb.file), f"SHA256:{deb.sha256}")]
    try:
        done = subprocess.run(
            [HELPER, *options, "download-file", *words],
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(f"{HELPER} is missing: install Debian's package apt") from None
    return done.stderr


def _is_valid(file: Path, deb: Deb) -> bool:
    return file.exists() and sha256_file(file) == deb.sha256


def _stanza(deb: Deb, file: Path) -> str:
    """Return the entry of a package in the index of the repository."""
    command = ["dpkg-deb", "--field", str(file)]
    control = subprocess.run(command, capture_output=True, text=True, check=True).stdout.rstrip()
    return f"{control}\nFilename: ./{deb.file}\nSize: {file.stat().st_size}\nSHA256: {deb.sha256}\n"


def _explain(missing: Sequence[Deb], errors: str, relock: str) -> str:
    lines = unquote(errors)  # apt encodes more characters than the lock
    gone = [deb for deb in missing if f"{unquote(deb.url)}{GONE}" in lines]
    first, *others = gone or missing
    which = f"{first.name}={first.version}" + (f" and {len(others)} more locked packages" if others else "")
    if gone:
        return f"Debian's archive no longer has {which}: run {relock}, commit the lock, and build again"
    cause = next((line for line in lines.splitlines() if line.startswith("E:")), "apt gave no reason")
    return f"{which} cannot be downloaded: check the network and apt's proxy ({cause})"
