"""Patched wheels: what is applied, what is recorded, and what is refused."""

import base64
import csv
import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from scripts.errors import UserError
from scripts.patches import apply, wheel_files
from scripts.patches.series import DATES, FIELDS, Series, parse_patch

ORIGINAL = "one\ntwo\nthree\nfour\nfive\nsix\n"
DIFF = "--- a/pkg/x.py\n+++ b/pkg/x.py\n@@ -2,3 +2,3 @@\n two\n-three\n+THREE\n four\n"
VALUES = (
    dict.fromkeys(FIELDS, "x")
    | dict.fromkeys(DATES, "2027-05-21")
    | {"Applied-Upstream": "no", "Kind": "fix"}
)
HEADER = "".join(f"{name}: {value}\n" for name, value in VALUES.items())


def series(*diffs: str, revision: int = 1) -> Series:
    found = [
        parse_patch(f"{number:04}-change.patch", f"{HEADER}---\n{diff}")
        for number, diff in enumerate(diffs, start=1)
    ]
    return Series("pkg", "1.0", revision, tuple(found))


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


def build(tmp_path: Path, one: Series, prefix: str = "") -> Path:
    pristine = make_wheel(tmp_path, prefix)
    return apply.build_patched_wheel(pristine, sha256(pristine), one, tmp_path / "out")


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


def test_modes_are_preserved(tmp_path: Path) -> None:
    with zipfile.ZipFile(build(tmp_path, series(DIFF))) as archive:
        assert archive.getinfo("pkg-1.0+stack.1.data/scripts/tool").external_attr >> 16 == 0o100755
        assert archive.getinfo("pkg/x.py").external_attr >> 16 & 0o777 in (0o600, 0o644)


def test_the_manifest_lists_the_changes_of_each_patch(tmp_path: Path) -> None:
    second = "--- a/pkg/x.py\n+++ b/pkg/x.py\n@@ -5,2 +5,2 @@\n five\n-six\n+SIX\n"
    wheel = build(tmp_path, series(DIFF, second))
    manifest = apply.read_manifest(wheel)
    first, last = manifest["patches"]
    assert first["files"][0]["before"] == hashlib.sha256(ORIGINAL.encode()).hexdigest()
    assert first["files"][0]["after"] == last["files"][0]["before"]
    assert last["files"][0]["after"] == hashlib.sha256(read(wheel, "pkg/x.py").encode()).hexdigest()


def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    built = []
    pristine = make_wheel(tmp_path)
    for out in (tmp_path / "a", tmp_path / "b"):
        built.append(apply.build_patched_wheel(pristine, sha256(pristine), series(DIFF), out).read_bytes())
    assert built[0] == built[1]


@pytest.mark.parametrize(("name", "value"), [("core.autocrlf", "true"), ("apply.ignoreWhitespace", "change")])
def test_the_users_configuration_of_git_and_environment_change_nothing(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", name)
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", value)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    with zipfile.ZipFile(build(tmp_path, series(DIFF))) as archive:
        assert b"\r" not in archive.read("pkg/x.py")
        assert {entry.date_time[:3] for entry in archive.infolist()} == {(1980, 1, 1)}
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="does not apply"):
        build(tmp_path / "other", series(DIFF.replace(" two", " two  ")))


def test_an_existing_wheel_is_not_rebuilt(tmp_path: Path) -> None:
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
        apply.build_patched_wheel(make_wheel(tmp_path), "0" * 64, series(DIFF), tmp_path)


@pytest.mark.parametrize(
    ("diff", "reason"),
    [
        (DIFF.replace("-three", "-drei"), r"0001-change.patch: the hunk at pkg/x.py line 2 does not apply"),
        (DIFF.replace("pkg/x.py", "pkg/y.py"), r"0001-change.patch: the wheel has no pkg/y.py"),
        (DIFF.replace(" four\n", ""), r"0001-change.patch: git apply: .*corrupt"),
    ],
    ids=["changed", "no such file", "no diff"],
)
def test_a_patch_that_does_not_apply_is_refused(tmp_path: Path, diff: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        build(tmp_path, series(diff))
    assert not list(tmp_path.glob("out/*"))


def test_a_hunk_at_another_line_is_applied_and_reported(tmp_path: Path) -> None:
    moved = series(DIFF.replace("@@ -2,3 +2,3", "@@ -3,3 +3,3"))
    assert "THREE" in read(build(tmp_path, moved), "pkg/x.py")
    files = wheel_files.read_wheel(make_wheel(tmp_path))
    assert apply.apply(files, "", moved.patches[0]).moved == ("hunk 1 applies at line 2",)
    files = wheel_files.read_wheel(make_wheel(tmp_path))
    assert apply.apply(files, "", series(DIFF).patches[0]).moved == ()
