"""Wheels as upstream released them: downloaded with the user's pip configuration, checked against a lock."""

import importlib.util
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.digests import sha256, sha256_file
from scripts.errors import UserError
from scripts.locking import exclusive_lock
from scripts.locks import lockfile
from scripts.patches.wheel_files import read_wheel
from scripts.paths import ROOT
from scripts.processes import captured

PRISTINE = ROOT / "build" / "wheels" / "pristine"
UNPACKED = ROOT / "build" / "pristine"
PYTHON = "3.11"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
# Signs in pip's output: of an index that cannot be reached, and of a file that is not there.
UNREACHABLE = ("ConnectionError", "NameResolution", "ConnectTimeout", "ReadTimeout", "SSLError", "ProxyError")
NOT_FOUND = ("conflicting dependencies", "No matching distribution")


def locked_hashes(name: str, version: str, lock: str) -> list[str]:
    """The sha256 digests that the text of a lock allows for ``name==version``."""
    for entry in lockfile.parse(lock):
        if (entry.name, entry.version) == (lockfile.normal(name), version) and HASH.search(entry.block):
            return HASH.findall(entry.block)
    raise UserError(f"{name}=={version} is not in the lock with hashes: run `python -m scripts lock`")


def fetch_pristine(name: str, version: str, hashes: Sequence[str], cache: Path = PRISTINE) -> Path:
    """The wheel of ``name==version`` with one of the sha256 digests ``hashes``, downloaded into ``cache``."""
    cache.mkdir(parents=True, exist_ok=True)
    for path in sorted(cache.glob(f"{name.replace('-', '_')}-{version}-*.whl")):
        if sha256(path.read_bytes()) in hashes:
            return path
    with tempfile.TemporaryDirectory(dir=cache) as directory:
        requirements = Path(directory) / "requirements.txt"
        requirements.write_text(f"{name}=={version} " + " ".join(f"--hash=sha256:{h}" for h in hashes) + "\n")
        command = [*_pip(), "download", "--quiet", "--no-input", "--no-deps", "--require-hashes"]
        command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON]
        command += ["--dest", directory]
        command += [option for platform in PLATFORMS for option in ("--platform", platform)]
        done = captured([*command, "-r", str(requirements)])
        wheels = list(Path(directory).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise UserError(
                f"cannot download {name}=={version} with pip: {explain_download_error(done.stderr)}"
            )
        return wheels[0].rename(cache / wheels[0].name)


def unpack_pristine(wheel: Path) -> Path:
    """The folder with the site-packages of a wheel, named by the wheel's sha256."""
    folder = UNPACKED / sha256_file(wheel)
    with exclusive_lock(UNPACKED, "the unpacking of a wheel"):
        if folder.exists():
            return folder
        with tempfile.TemporaryDirectory(dir=UNPACKED) as unfinished:
            for name, file in read_wheel(wheel).items():
                parts = Path(name).parts
                target = Path(unfinished, *(parts[2:] if parts[0].endswith(".data") else parts))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.content)
                target.chmod(file.mode)  # Ray runs some
            Path(unfinished).chmod(0o755)
            return Path(unfinished).rename(folder)


def explain_download_error(errors: str) -> str:
    """The cause of a failed download in pip's stderr ``errors``, with what to do about it."""
    if "DO NOT MATCH THE HASHES" in errors:
        return "a file of the index does not have the digest that the lock names: nothing was installed"
    if any(sign in errors for sign in UNREACHABLE):
        return "the package index cannot be reached: check the network, the proxy and `pip config list`"
    if any(sign in errors for sign in NOT_FOUND):  # pip does not report an index that refuses the request
        return (
            "no index or folder of pip's has this version for Python 3.11, or the index refuses the "
            "credentials: check `pip config list` and ~/.netrc"
        )
    lines = errors.strip().splitlines() or ["pip gave no reason"]
    errors_of_pip = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    return errors_of_pip[0].removeprefix("ERROR: ")


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    if found is None:
        raise UserError("pip is needed to download wheels; install it (Debian: apt-get install python3-pip)")
    return [found]
