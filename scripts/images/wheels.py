"""Wheels of this distribution: upstream's with our patches applied, and our own runtime package.

A patched wheel has our local version in its metadata, in the name of its dist-info directory and in its file
name, never in the package's ``__version__``. Same pristine wheel and same patches give the same bytes.
"""

import argparse
import base64
import csv
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.errors import UserError, run
from scripts.patches import patch_series
from scripts.patches.patch_series import Patch, Series
from scripts.paths import ROOT

PRISTINE = ROOT / "build" / "wheels" / "pristine"
RUNTIME = ROOT / "images" / "runtime"
MANIFEST = "rlhf-stack-patches.json"  # in the dist-info of a patched wheel
EXPECTED = "patched.json"  # in the runtime's package: the manifests of all patched wheels
PYTHON = "3.11"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64")
FIRST_ZIP_DATE = 315532800  # 1980-01-01, the oldest that a zip can say
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
FAILED = re.compile(r"error: patch failed: (\S+):(\d+)")
MOVED = re.compile(r"Hunk #(\d+) succeeded at (\d+) \(offset")


@dataclass(frozen=True)
class Entry:
    """A file in a wheel; ``mode`` are its permission bits."""

    content: bytes
    mode: int


Files = dict[str, Entry]


def locked_hashes(name: str, version: str, lock: str) -> list[str]:
    """The sha256 that the text of a lock allows for ``name==version``."""
    pinned = re.compile(rf"^{re.escape(name)}=={re.escape(version)}(?=[\s\\;]|$)")
    lines = lock.splitlines()
    for number, line in enumerate(lines):
        if pinned.match(line):
            block = [line]
            for following in lines[number + 1 :]:
                if not following.startswith((" ", "\t")):
                    break
                block.append(following)
            hashes = HASH.findall("\n".join(block))
            if hashes:
                return hashes
    raise UserError(f"{name}=={version} is not in the lock with hashes; run `nox -s lock`")


def fetch_pristine(name: str, version: str, hashes: Sequence[str], cache: Path = PRISTINE) -> Path:
    """The wheel as released, by the user's own pip configuration; kept in ``cache``."""
    cache.mkdir(parents=True, exist_ok=True)
    for path in sorted(cache.glob(f"{name.replace('-', '_')}-{version}-*.whl")):
        if _sha256(path.read_bytes()) in hashes:
            return path
    with tempfile.TemporaryDirectory(dir=cache) as directory:
        requirements = Path(directory) / "requirements.txt"
        requirements.write_text(f"{name}=={version} " + " ".join(f"--hash=sha256:{h}" for h in hashes) + "\n")
        command = [*_pip(), "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
        command += ["--python-version", PYTHON, "--implementation", "cp", "--dest", directory]
        command += [option for platform in PLATFORMS for option in ("--platform", platform)]
        done = subprocess.run(
            [*command, "-r", str(requirements)], capture_output=True, text=True, check=False
        )
        wheels = list(Path(directory).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise UserError(f"cannot download {name}=={version} with pip: {_why(done.stderr)}")
        return wheels[0].rename(cache / wheels[0].name)


def _why(errors: str) -> str:
    """What pip's errors come to, and what to do about it."""
    if "DO NOT MATCH THE HASHES" in errors:
        return "the index has a file of another content than the lock names: nothing was installed"
    if any(
        sign in errors for sign in ("NewConnectionError", "NameResolutionError", "ConnectTimeout", "SSLError")
    ):
        return "the package index cannot be reached: check the network, the proxy and `pip config list`"
    lines = errors.strip().splitlines() or ["pip gave no reason"]
    telling = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    return telling[0].removeprefix("ERROR: ")


def build_patched_wheel(pristine: Path, sha256: str, series: Series, out: Path) -> Path:
    """Write ``pristine`` with ``series`` applied to directory ``out``; nothing to do if it is there already.

    UserError if the wheel is not the one that the lock names, or names the patch and hunk that does not fit
    exactly (no fuzz, no offset).
    """
    actual = _sha256(pristine.read_bytes())
    if actual != sha256:
        raise UserError(f"{pristine.name} has sha256 {actual}, the lock says {sha256}: delete the file")
    distribution, version, tags = _split(pristine.name)
    local = f"{version}+{series.label}"
    target = out / f"{distribution}-{local}-{tags}.whl"
    inputs = _inputs(sha256, series)
    if _built_from(target) == inputs:
        return target
    files = _read(pristine)
    info, data = f"{distribution}-{version}.dist-info", f"{distribution}-{version}.data"
    prefix = site_packages(pristine.name, files)
    manifest = {
        "package": series.package,
        "version": version,
        "label": series.label,
        "pristine": {"file": pristine.name, "sha256": sha256},
        "inputs": inputs,
        "patches": [apply(files, prefix, patch) for patch in series.patches],
    }
    files = {name.replace(f"{data}/", f"{distribution}-{local}.data/", 1): e for name, e in files.items()}
    files = {
        name.replace(f"{info}/", f"{distribution}-{local}.dist-info/", 1): e for name, e in files.items()
    }
    info = f"{distribution}-{local}.dist-info"
    metadata = files[f"{info}/METADATA"]
    changed, count = re.subn(rb"(?m)^Version: .*$", f"Version: {local}".encode(), metadata.content, count=1)
    if count != 1:
        raise UserError(f"{pristine.name}: its METADATA has no Version")
    files[f"{info}/METADATA"] = Entry(changed, metadata.mode)
    files[f"{info}/{MANIFEST}"] = Entry((json.dumps(manifest, indent=1) + "\n").encode(), 0o644)
    return _write(files, info, target)


def build_runtime_wheel(out: Path, patched: Sequence[Path], source: Path = RUNTIME) -> Path:
    """Write the wheel of ``rlhf_stack`` to directory ``out``; pure Python, so no build backend is needed.

    It carries the manifests of the ``patched`` wheels, so that it notices a package reinstalled over ours.
    """
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project["version"]
    info = f"{name}-{version}.dist-info"
    files = {
        str(path.relative_to(source)): Entry(path.read_bytes(), 0o644)
        for path in sorted((source / name).rglob("*"))
        if path.is_file() and path.suffix != ".pyc"
    }
    manifests = json.dumps([read_manifest(wheel) for wheel in patched], indent=1) + "\n"
    files[f"{name}/{EXPECTED}"] = Entry(manifests.encode(), 0o644)
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        f"Summary: {project['description']}",
        f"License: {project['license']['text']}",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {requirement}" for requirement in project["dependencies"]),
    ]
    scripts = [
        "[console_scripts]",
        *(f"{name} = {function}" for name, function in project["scripts"].items()),
    ]
    wheel = ["Wheel-Version: 1.0", "Generator: rlhf-stacks", "Root-Is-Purelib: true", "Tag: py3-none-any"]
    files[f"{info}/METADATA"] = Entry(("\n".join(metadata) + "\n").encode(), 0o644)
    files[f"{info}/WHEEL"] = Entry(("\n".join(wheel) + "\n").encode(), 0o644)
    files[f"{info}/entry_points.txt"] = Entry(("\n".join(scripts) + "\n").encode(), 0o644)
    return _write(files, info, out / f"{name}-{version}-py3-none-any.whl")


def read_manifest(wheel: Path) -> dict[str, Any]:
    """What `build_patched_wheel` recorded in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(f".dist-info/{MANIFEST}"))
        manifest: dict[str, Any] = json.loads(archive.read(name))
    return manifest


def make_wheels(packages: Sequence[str], lock: Path, out: Path) -> list[Path]:
    """Build into ``out`` a patched wheel for each of ``packages`` ("name==version") and the runtime's wheel.

    A package without a series in patches/ is a UserError: it would be carried as released, by the lock alone.
    """
    out.mkdir(parents=True, exist_ok=True)
    text = lock.read_text(encoding="utf-8")
    wheels = []
    for package in packages:
        name, _, version = package.partition("==")
        series = patch_series.load(name, version)
        if series is None:
            known = ", ".join(f"{s.package}=={s.version}" for s in patch_series.load_all())
            raise UserError(f"no patches for {package!r}; there are some for {known}")
        pristine = fetch_pristine(name, version, locked_hashes(name, version, text))
        wheels.append(build_patched_wheel(pristine, _sha256(pristine.read_bytes()), series, out))
    return [*wheels, build_runtime_wheel(out, wheels)]


def site_packages(wheel: str, names: Iterable[str]) -> str:
    """Where, in a wheel of that file name with files of these ``names``, is what goes into site-packages."""
    distribution, version, _ = _split(wheel)
    folders = [f"{distribution}-{version}.data/{kind}/" for kind in ("purelib", "platlib")]
    names = list(names)
    return next((folder for folder in folders if any(name.startswith(folder) for name in names)), "")


def apply(files: Files, prefix: str, patch: Patch) -> dict[str, object]:
    """Apply one patch to ``files`` in place; what it changed, for the manifest."""
    record = []
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for name in patch.files:
            if prefix + name not in files:
                raise UserError(f"{patch.name}: the wheel has no {name}")
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[prefix + name].content)
        done = subprocess.run(
            ["git", "apply", "--verbose", "--whitespace=nowarn", "-"],
            input=patch.diff,
            cwd=root,
            env=os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent), "LC_ALL": "C"},
            capture_output=True,
            text=True,
            check=False,
        )
        failed, moved = FAILED.search(done.stderr), MOVED.search(done.stderr)
        if failed:
            raise UserError(f"{patch.name}: the hunk at {failed[1]} line {failed[2]} does not fit the wheel")
        if done.returncode:
            raise UserError(f"{patch.name}: git apply: {done.stderr.strip().splitlines()[-1]}")
        if moved:
            raise UserError(
                f"{patch.name}: hunk {moved[1]} fits only at another line ({moved[2]}); refresh it"
            )
        for name in patch.files:
            before = files[prefix + name]
            after = (root / name).read_bytes()
            if after == before.content:
                raise UserError(f"{patch.name}: {name} is the same after it")
            files[prefix + name] = Entry(after, before.mode)
            record.append({"path": name, "before": _sha256(before.content), "after": _sha256(after)})
    return {"name": patch.name, "title": patch.title, "review_by": str(patch.review_by), "files": record}


def _inputs(sha256: str, series: Series) -> str:
    """What a patched wheel is made from: the pristine wheel, each patch in order, this tool."""
    parts = [sha256, series.label, _sha256(Path(__file__).read_bytes()), str(_epoch())]
    parts += [
        _sha256(repr((patch.name, sorted(patch.header.items()), patch.diff)).encode())
        for patch in series.patches
    ]
    return _sha256("\n".join(parts).encode())


def _built_from(wheel: Path) -> str | None:
    try:
        return str(read_manifest(wheel)["inputs"])
    except (FileNotFoundError, zipfile.BadZipFile, StopIteration):
        return None


def _read(wheel: Path) -> Files:
    with zipfile.ZipFile(wheel) as archive:
        return {
            entry.filename: Entry(archive.read(entry), (entry.external_attr >> 16) & 0o777 or 0o644)
            for entry in archive.infolist()
            if not entry.is_dir()
        }


def _write(files: Files, info: str, target: Path) -> Path:
    """Write a wheel with a true RECORD: sorted, one date, stored (deflate differs between zlib versions)."""
    record = f"{info}/RECORD"
    listing = io.StringIO()
    rows = csv.writer(listing, lineterminator="\n")
    for name, entry in sorted(files.items()):
        if name != record:
            rows.writerow((name, _record_hash(entry.content), len(entry.content)))
    rows.writerow((record, "", ""))
    files = files | {record: Entry(listing.getvalue().encode(), 0o644)}
    date = time.gmtime(_epoch())[:6]
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".part")
    with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files, key=lambda name: (name.startswith(f"{info}/"), name)):
            member = zipfile.ZipInfo(name, date)
            member.create_system = 3  # Unix, so that the mode counts
            member.external_attr = (0o100000 | files[name].mode) << 16
            archive.writestr(member, files[name].content)
    unfinished.replace(target)
    return target


def _epoch() -> int:
    return max(FIRST_ZIP_DATE, int(os.environ.get("SOURCE_DATE_EPOCH", FIRST_ZIP_DATE)))


def _split(wheel: str) -> tuple[str, str, str]:
    """Distribution, version and tags (with a build number, if any) of a wheel's file name."""
    distribution, version, tags = wheel.removesuffix(".whl").split("-", 2)
    return distribution, version, tags


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _record_hash(content: bytes) -> str:
    encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return "sha256=" + encoded.rstrip(b"=").decode()


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    if found is None:
        raise UserError("pip is needed to download wheels; install it (Debian: apt-get install python3-pip)")
    return [found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the patched wheels of packages that a lock pins, and the runtime's wheel."""
    parser = argparse.ArgumentParser(prog="python -m scripts.images.wheels", description=main.__doc__)
    parser.add_argument("packages", nargs="+", metavar="NAME==VERSION")
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    for wheel in make_wheels(options.packages, options.lock, options.out):
        print(wheel)
    return 0


if __name__ == "__main__":
    run(main)
