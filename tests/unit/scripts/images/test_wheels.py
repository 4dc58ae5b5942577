"""The wheel of the runtime package."""

import json
import zipfile
from pathlib import Path

from scripts.images import wheels
from scripts.patches.apply import read_manifest
from tests.unit.scripts.patches.test_apply import DIFF, build, series

INFO = "rlhf_stack-0.1.0.dist-info"


def test_the_runtime_wheel_has_the_whole_package_and_the_manifests(tmp_path: Path) -> None:
    patched = build(tmp_path, series(DIFF))
    wheel = wheels.build_runtime_wheel(tmp_path, [patched])
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        expected = {
            str(path.relative_to(wheels.RUNTIME)) for path in wheels.RUNTIME.rglob("rlhf_stack/**/*.py")
        }
        assert expected | {"rlhf_stack/py.typed", "rlhf_stack/patched.json"} <= names
        assert not any(name.endswith(".pyc") for name in names)
        assert "rlhf-stack = rlhf_stack.cli.main:main" in archive.read(f"{INFO}/entry_points.txt").decode()
        assert "Requires-Dist: rich>=13" in archive.read(f"{INFO}/METADATA").decode().splitlines()
        assert json.loads(archive.read("rlhf_stack/patched.json")) == [read_manifest(patched)]
    before = wheel.read_bytes()
    assert wheels.build_runtime_wheel(tmp_path, [patched]).read_bytes() == before
