"""The wheels as released: which the lock allows, and why a download failed."""

import sys
from pathlib import Path

import pytest

from scripts.errors import UserError
from scripts.patches import pristine
from scripts.patches.wheel_files import WheelFile, write_wheel
from tests.unit.scripts.patches.test_apply import make_wheel, sha256

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
    assert pristine.locked_hashes("pkg-a", "1.0", lock) == [HASHES["a"], HASHES["b"]]
    assert pristine.locked_hashes("pkg", "1.0.1", lock) == [HASHES["c"]]
    with pytest.raises(UserError, match=r"pkg==1.0 is not in the lock"):
        pristine.locked_hashes("pkg", "1.0", lock)


def test_a_cached_wheel_is_used_only_if_the_lock_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = make_wheel(tmp_path)
    assert pristine.fetch_pristine("pkg", "1.0", [sha256(wheel)], tmp_path) == wheel
    failing = [sys.executable, "-c", "import sys; sys.exit('ERROR: no index')"]
    monkeypatch.setattr(pristine, "_pip", lambda: failing)
    with pytest.raises(UserError, match=r"cannot download pkg==1.0 with pip: no index"):
        pristine.fetch_pristine("pkg", "1.0", ["0" * 64], tmp_path)


def test_a_download_is_checked_by_pip_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_wheel(tmp_path)
    script = (
        "import json, pathlib, shutil, sys\n"
        "a = sys.argv\n"
        "assert {'--require-hashes', '--no-deps', '--no-input'} <= {*a}, a\n"
        "assert pathlib.Path(a[-1]).read_text() == 'pkg==1.0 --hash=sha256:abc\\n'\n"
        f"shutil.copy({str(source)!r}, a[a.index('--dest') + 1])\n"
    )
    monkeypatch.setattr(pristine, "_pip", lambda: [sys.executable, "-c", script])
    cached = pristine.fetch_pristine("pkg", "1.0", ["abc"], tmp_path / "cache")
    assert cached == tmp_path / "cache" / source.name
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [source.name]


@pytest.mark.parametrize(
    ("errors", "cause"),
    [
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.\n  Got x\n",
            "does not have the digest",
        ),
        (
            "WARNING: Retrying after NewConnectionError('x')\nERROR: No matching distribution\n",
            "cannot be reached",
        ),
        (
            "ERROR: Cannot install a==1 because these package versions have conflicting dependencies.\n",
            "no index",
        ),
        (
            "WARNING: Retrying after connection broken by 'ProxyError('Cannot connect to proxy.'\n"
            "ERROR: No matching distribution found for a==1\n",
            "cannot be reached",
        ),
        ("ERROR: HTTPSConnectionPool(host='h', port=443): Read timed out. ReadTimeoutError\n", "be reached"),
        ("ERROR: No matching distribution found for a==1\n", "or the index refuses the credentials"),
        ("ERROR: first\nERROR: second\n", "first"),
        ("", "gave no reason"),
    ],
)
def test_the_cause_of_a_failed_download_is_named(errors: str, cause: str) -> None:
    assert cause in pristine.explain_download_error(errors)


def test_another_wheel_of_the_same_name_has_a_tree_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index may offer a wheel again with other content; the lock then names its hash."""
    monkeypatch.setattr(pristine, "UNPACKED", tmp_path / "unpacked")
    (tmp_path / "unpacked").mkdir()
    wheel = tmp_path / "pkg-1.0-py3-none-any.whl"
    folders = []
    for content in (b"one", b"two", b"one"):
        write_wheel({"pkg/__init__.py": WheelFile(content, 0o755)}, "pkg-1.0.dist-info", wheel)
        folder = pristine.unpack_pristine(wheel)
        unpacked = folder / "pkg" / "__init__.py"
        assert (folder.name, unpacked.read_bytes()) == (sha256(wheel), content)
        assert unpacked.stat().st_mode & 0o777 == 0o755
        folders.append(folder)
    assert folders[0] == folders[2] != folders[1]
