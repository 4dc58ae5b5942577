import base64
import csv
import hashlib
import io
import json
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.errors import UserError
from scripts.images import wheels
from scripts.patches import patch_series

ORIGINAL = "one\ntwo\nthree\nfour\nfive\nsix\n"
DIFF = "--- a/pkg/x.py\n+++ b/pkg/x.py\n@@ -2,3 +2,3 @@\n two\n-three\n+THREE\n four\n"
VALUES = (
    dict.fromkeys(patch_series.FIELDS, "x")
    | dict.fromkeys(patch_series.DATES, "2027-05-21")
    | {"Applied-Upstream": "no"}
)
HEADER = "".join(f"{name}: {value}\n" for name, value in VALUES.items())


def series(*diffs: str, revision: int = 1) -> patch_series.Series:
    found = [
        patch_series.parse_patch(f"{number:04}-change.patch", f"{HEADER}---\n{diff}")
        for number, diff in enumerate(diffs, start=1)
    ]
    return patch_series.Series("pkg", "1.0", revision, tuple(found))


def make_wheel(folder: Path, prefix: str = "") -> Path:
    path = folder / "pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{prefix}pkg/x.py", ORIGINAL)
        archive.writestr(f"{prefix}pkg/a,b.json", "{}")
        tool = zipfile.ZipInfo("pkg-1.0.data/scripts/tool")
        tool.external_attr = 0o100755 << 16
        archive.writestr(tool, "#!python\n")
        metadata = "Metadata-Version: 2.1\nName: pkg\nVersion: 1.0\n\nVersion: 1.0 is great\n"
        archive.writestr("pkg-1.0.dist-info/METADATA", metadata)
        archive.writestr("pkg-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
        archive.writestr("pkg-1.0.dist-info/RECORD", "stale,,\n")
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build(tmp_path: Path, one: patch_series.Series, prefix: str = "") -> Path:
    pristine = make_wheel(tmp_path, prefix)
    return wheels.build_patched_wheel(pristine, sha256(pristine), one, tmp_path / "out")


def read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name).decode()


@pytest.mark.parametrize(
    ("prefix", "installed"),
    [
        ("", ""),
        ("pkg-1.0.data/purelib/", "pkg-1.0+stack.1.data/purelib/"),
        ("pkg-1.0.data/platlib/", "pkg-1.0+stack.1.data/platlib/"),
    ],
)
def test_the_patch_is_applied_where_the_wheel_keeps_its_packages(
    tmp_path: Path, prefix: str, installed: str
) -> None:
    wheel = build(tmp_path, series(DIFF), prefix)
    assert read(wheel, f"{installed}pkg/x.py") == ORIGINAL.replace("three", "THREE")


def test_the_local_version_is_in_the_metadata_only(tmp_path: Path) -> None:
    wheel = build(tmp_path, series(DIFF, revision=4))
    assert wheel.name == "pkg-1.0+stack.4-py3-none-any.whl"
    metadata = read(wheel, "pkg-1.0+stack.4.dist-info/METADATA")
    assert "Name: pkg\nVersion: 1.0+stack.4\n" in metadata
    assert "Version: 1.0 is great" in metadata


def test_record_lists_every_file_with_its_true_hash(tmp_path: Path) -> None:
    wheel = build(tmp_path, series(DIFF))
    with zipfile.ZipFile(wheel) as archive:
        record = "pkg-1.0+stack.1.dist-info/RECORD"
        rows = {name: (digest, size) for name, digest, size in csv.reader(io.StringIO(read(wheel, record)))}
        assert set(rows) == set(archive.namelist())
        assert rows.pop(record) == ("", "")
        for name, (digest, size) in rows.items():
            content = archive.read(name)
            encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={encoded}", str(len(content)))


def test_modes_are_kept(tmp_path: Path) -> None:
    with zipfile.ZipFile(build(tmp_path, series(DIFF))) as archive:
        assert archive.getinfo("pkg-1.0+stack.1.data/scripts/tool").external_attr >> 16 == 0o100755
        assert archive.getinfo("pkg/x.py").external_attr >> 16 & 0o777 in (0o600, 0o644)


def test_the_manifest_says_what_each_patch_changed(tmp_path: Path) -> None:
    second = "--- a/pkg/x.py\n+++ b/pkg/x.py\n@@ -5,2 +5,2 @@\n five\n-six\n+SIX\n"
    wheel = build(tmp_path, series(DIFF, second))
    manifest = wheels.read_manifest(wheel)
    first, last = manifest["patches"]
    assert first["files"][0]["before"] == hashlib.sha256(ORIGINAL.encode()).hexdigest()
    assert first["files"][0]["after"] == last["files"][0]["before"]
    assert last["files"][0]["after"] == hashlib.sha256(read(wheel, "pkg/x.py").encode()).hexdigest()


def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    built = []
    pristine = make_wheel(tmp_path)
    for out in (tmp_path / "a", tmp_path / "b"):
        built.append(wheels.build_patched_wheel(pristine, sha256(pristine), series(DIFF), out).read_bytes())
    assert built[0] == built[1]


def test_the_date_in_the_wheel_is_source_date_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    with zipfile.ZipFile(build(tmp_path, series(DIFF))) as archive:
        assert {entry.date_time[:3] for entry in archive.infolist()} == {(2023, 11, 14)}


def test_what_is_there_already_is_not_built_again(tmp_path: Path) -> None:
    first = build(tmp_path, series(DIFF))
    before = first.stat().st_mtime_ns
    assert build(tmp_path, series(DIFF)).stat().st_mtime_ns == before
    changed = build(tmp_path, series(DIFF.replace("THREE", "drei")))
    assert changed == first
    assert "drei" in read(changed, "pkg/x.py")


def test_a_broken_wheel_in_the_way_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "pkg-1.0+stack.1-py3-none-any.whl").write_bytes(b"half a file")
    assert "THREE" in read(build(tmp_path, series(DIFF)), "pkg/x.py")


def test_another_wheel_than_the_locked_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the lock says 00"):
        wheels.build_patched_wheel(make_wheel(tmp_path), "0" * 64, series(DIFF), tmp_path)


@pytest.mark.parametrize(
    ("diff", "reason"),
    [
        (DIFF.replace("-three", "-drei"), r"0001-change.patch: the hunk at pkg/x.py line 2 does not fit"),
        (
            DIFF.replace("@@ -2,3 +2,3", "@@ -3,3 +3,3"),
            r"0001-change.patch: hunk 1 fits only at another line",
        ),
        (DIFF.replace("pkg/x.py", "pkg/y.py"), r"0001-change.patch: the wheel has no pkg/y.py"),
        (DIFF.replace(" four\n", ""), r"0001-change.patch: git apply: .*corrupt"),
    ],
    ids=["changed", "moved", "no such file", "no diff"],
)
def test_a_patch_that_does_not_fit_exactly_is_named(tmp_path: Path, diff: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        build(tmp_path, series(diff))
    assert not list(tmp_path.glob("out/*"))


LOCK = """\
pkg-a==1.0 \\
    --hash=sha256:{a} \\
    --hash=sha256:{b}
    # via something
pkg==1.0.1 ; python_version > "3" \\
    --hash=sha256:{c}
"""
HASHES = {name: name * 64 for name in "abc"}


def test_hashes_come_from_the_lock() -> None:
    lock = LOCK.format(**HASHES)
    assert wheels.locked_hashes("pkg-a", "1.0", lock) == [HASHES["a"], HASHES["b"]]
    assert wheels.locked_hashes("pkg", "1.0.1", lock) == [HASHES["c"]]
    with pytest.raises(UserError, match=r"pkg==1.0 is not in the lock"):
        wheels.locked_hashes("pkg", "1.0", lock)


def test_a_kept_wheel_is_taken_only_if_the_lock_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path)
    assert wheels.fetch_pristine("pkg", "1.0", [sha256(wheel)], tmp_path) == wheel
    failing = [sys.executable, "-c", "import sys; sys.exit('ERROR: no index')"]
    monkeypatch.setattr(wheels, "_pip", lambda: failing)
    with pytest.raises(UserError, match=r"cannot download pkg==1.0 with pip: no index"):
        wheels.fetch_pristine("pkg", "1.0", ["0" * 64], tmp_path)


def test_a_download_is_checked_by_pip_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_wheel(tmp_path)
    script = (
        "import json, pathlib, shutil, sys\n"
        "a = sys.argv\n"
        "assert '--require-hashes' in a and '--no-deps' in a, a\n"
        "assert pathlib.Path(a[-1]).read_text() == 'pkg==1.0 --hash=sha256:abc\\n'\n"
        f"shutil.copy({str(source)!r}, a[a.index('--dest') + 1])\n"
    )
    monkeypatch.setattr(wheels, "_pip", lambda: [sys.executable, "-c", script])
    kept = wheels.fetch_pristine("pkg", "1.0", ["abc"], tmp_path / "cache")
    assert kept == tmp_path / "cache" / source.name
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [source.name]


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
        assert json.loads(archive.read("rlhf_stack/patched.json")) == [wheels.read_manifest(patched)]
    before = wheel.read_bytes()
    assert wheels.build_runtime_wheel(tmp_path, [patched]).read_bytes() == before


def test_a_package_without_patches_is_refused_with_those_that_have_some(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("")
    with pytest.raises(UserError, match=r"no patches for 'pkg==1.0'; there are some for openrlhf==0.11.2"):
        wheels.make_wheels(["pkg==1.0"], lock, tmp_path)


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n  Got x\n",
            "another content",
        ),
        (
            "WARNING: Retrying after NewConnectionError('x')\nERROR: No matching distribution\n",
            "cannot be reached",
        ),
        ("ERROR: first\nERROR: second\n", "first"),
        ("", "gave no reason"),
    ],
)
def test_why_a_download_failed_is_told(errors: str, told: str) -> None:
    """By what it comes to, not by pip's last line."""
    assert told in wheels._why(errors)
