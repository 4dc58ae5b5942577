"""Apply a series of patches to the wheel that upstream released.

A patched wheel has our local version in its metadata, in the name of its dist-info directory and in its file
name, never in the package's ``__version__``. The same pristine wheel and patches give the same bytes.
"""

import json
import os
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.digests import sha256
from scripts.errors import UserError
from scripts.patches import wheel_files
from scripts.patches.series import Patch, Series
from scripts.patches.wheel_files import Files, WheelFile, read_wheel, split_name, write_wheel

MANIFEST = "rlhf-stack-patches.json"  # in the dist-info of a patched wheel
FAILED = re.compile(r"error: patch failed: (\S+):(\d+)")
KINDS = ("dist-info", "data")  # the folders of a wheel that have its version in their names
MOVED = re.compile(r"Hunk #(\d+) succeeded at (\d+) \(offset")


@dataclass(frozen=True)
class Applied:
    """What a patch changed (``record``, for the manifest), and its hunks that applied at another line."""

    record: dict[str, object]
    moved: tuple[str, ...]


def build_patched_wheel(pristine: Path, digest: str, series: Series, out: Path) -> Path:
    """Write the wheel ``pristine`` with ``series`` applied to the folder ``out``, unless it is there already.

    UserError if the wheel's sha256 is not the ``digest`` of the lock, or if a hunk does not apply.
    """
    actual = sha256(pristine.read_bytes())
    if actual != digest:
        raise UserError(f"{pristine.name} has sha256 {actual}, the lock says {digest}: delete the file")
    distribution, version, tags = split_name(pristine.name)
    local = f"{version}+{series.label}"
    target = out / f"{distribution}-{local}-{tags}.whl"
    inputs = _inputs(digest, series)
    if _built_from(target) == inputs:
        return target
    files = read_wheel(pristine)
    prefix = site_packages(pristine.name, files)
    manifest = {
        "package": series.package,
        "version": version,
        "label": series.label,
        "pristine": {"file": pristine.name, "sha256": digest},
        "inputs": inputs,
        "patches": [apply(files, prefix, patch).record for patch in series.patches],
    }
    renamed = {f"{distribution}-{version}.{kind}/": f"{distribution}-{local}.{kind}/" for kind in KINDS}
    files = {_renamed(name, renamed): entry for name, entry in files.items()}
    info = f"{distribution}-{local}.dist-info"
    metadata = files[f"{info}/METADATA"]
    changed, count = re.subn(rb"(?m)^Version: .*$", f"Version: {local}".encode(), metadata.content, count=1)
    if count != 1:
        raise UserError(f"{pristine.name}: its METADATA has no Version")
    files[f"{info}/METADATA"] = WheelFile(changed, metadata.mode)
    files[f"{info}/{MANIFEST}"] = WheelFile((json.dumps(manifest, indent=1) + "\n").encode(), 0o644)
    return write_wheel(files, info, target)


def _renamed(name: str, folders: dict[str, str]) -> str:
    for before, after in folders.items():
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name


def read_manifest(wheel: Path) -> dict[str, Any]:
    """The manifest that `build_patched_wheel` wrote into a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(f".dist-info/{MANIFEST}"))
        manifest: dict[str, Any] = json.loads(archive.read(name))
    return manifest


def site_packages(wheel: str, names: Iterable[str]) -> str:
    """The folder of a wheel (by its file name and the ``names`` in it) that is installed to site-packages."""
    distribution, version, _ = split_name(wheel)
    folders = [f"{distribution}-{version}.data/{kind}/" for kind in ("purelib", "platlib")]
    names = list(names)
    return next((folder for folder in folders if any(name.startswith(folder) for name in names)), "")


def apply(files: Files, prefix: str, patch: Patch) -> Applied:
    """Apply one patch to ``files`` in place, whose site-packages is the folder ``prefix``.

    A hunk may apply at another line than it names, but its context must match exactly.
    """
    changes = []
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
            env=_git_environment(root),
            capture_output=True,
            text=True,
            check=False,
        )
        if failed := FAILED.search(done.stderr):
            raise UserError(f"{patch.name}: the hunk at {failed[1]} line {failed[2]} does not apply")
        if done.returncode:
            raise UserError(f"{patch.name}: git apply: {done.stderr.strip().splitlines()[-1]}")
        for name in patch.files:
            before = files[prefix + name]
            after = (root / name).read_bytes()
            if after == before.content:
                raise UserError(f"{patch.name}: it does not change {name}")
            files[prefix + name] = WheelFile(after, before.mode)
            changes.append({"path": name, "before": sha256(before.content), "after": sha256(after)})
    record: dict[str, object] = {
        "name": patch.name,
        "title": patch.title,
        "review_by": str(patch.review_by),
        "files": changes,
    }
    moved = tuple(f"hunk {number} applies at line {line}" for number, line in MOVED.findall(done.stderr))
    return Applied(record, moved)


def _git_environment(folder: Path) -> dict[str, str]:
    """Return variables without the user's configuration, which may change line ends or ignore blanks."""
    no_configuration = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    no_configuration |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1"}
    limits = {"GIT_CEILING_DIRECTORIES": str(folder.parent), "LC_ALL": "C"}
    return {"PATH": os.environ["PATH"], **no_configuration, **limits}


def _inputs(digest: str, series: Series) -> str:
    """The digest of all that a patched wheel is made from: the pristine wheel, the patches, our code."""
    modules = [sha256(Path(module).read_bytes()) for module in (__file__, wheel_files.__file__)]
    parts = [digest, series.label, *modules]
    parts += [
        sha256(repr((patch.name, sorted(patch.header.items()), patch.diff))) for patch in series.patches
    ]
    return sha256("\n".join(parts))


def _built_from(wheel: Path) -> str | None:
    try:
        return str(read_manifest(wheel)["inputs"])
    except (FileNotFoundError, zipfile.BadZipFile, StopIteration):
        return None
