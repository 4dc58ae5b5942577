"""The wheels that a build installs from here: patched packages and the runtime package."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

from scripts import git
from scripts.digests import sha256
from scripts.patches.apply import build_patched_wheel, read_manifest
from scripts.patches.pristine import fetch_pristine, locked_hashes
from scripts.patches.series import Series
from scripts.patches.wheel_files import WheelFile, write_wheel
from scripts.paths import ROOT

RUNTIME = ROOT / "images" / "runtime"
EXPECTED = "patched.json"  # in the runtime's package: the manifests of all patched wheels


def build_runtime_wheel(out: Path, patched: Sequence[Path]) -> Path:
    """Write the wheel of ``rlhf_stack`` to the folder ``out``; pure Python, so no build backend is needed.

    It contains the manifests of the ``patched`` wheels, by which it detects a package reinstalled over ours.
    """
    project = tomllib.loads((RUNTIME / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project["version"]
    info = f"{name}-{version}.dist-info"
    known = set(git.files())  # without those that git ignores, such as backups of an editor
    files = {
        str(path.relative_to(RUNTIME)): WheelFile(path.read_bytes(), 0o644)
        for path in sorted((RUNTIME / name).rglob("*"))
        if path.is_file() and path.suffix != ".pyc" and (path in known or not known)
    }
    manifests = json.dumps([read_manifest(wheel) for wheel in patched], indent=1) + "\n"
    files[f"{name}/{EXPECTED}"] = WheelFile(manifests.encode(), 0o644)
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
    files[f"{info}/METADATA"] = WheelFile(("\n".join(metadata) + "\n").encode(), 0o644)
    files[f"{info}/WHEEL"] = WheelFile(("\n".join(wheel) + "\n").encode(), 0o644)
    files[f"{info}/entry_points.txt"] = WheelFile(("\n".join(scripts) + "\n").encode(), 0o644)
    return write_wheel(files, info, out / f"{name}-{version}-py3-none-any.whl")


def make_wheels(patched: Sequence[Series], lock: Path, out: Path) -> list[Path]:
    """Write to ``out`` the wheel of each series, as ``lock`` pins it, and the wheel of the runtime."""
    out.mkdir(parents=True, exist_ok=True)
    text = lock.read_text(encoding="utf-8")
    wheels = []
    for series in patched:
        hashes = locked_hashes(series.package, series.version, text)
        pristine = fetch_pristine(series.package, series.version, hashes)
        wheels.append(build_patched_wheel(pristine, sha256(pristine.read_bytes()), series, out))
    return [*wheels, build_runtime_wheel(out, wheels)]
