"""The repository of a root: only locked packages, verified, also where Debian's archive has moved on."""

import functools
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from scripts.digests import sha256, sha256_file
from scripts.errors import UserError
from scripts.images import repository
from scripts.locks import debian
from scripts.locks.debian import Deb

pytestmark = pytest.mark.skipif(
    not Path(repository.HELPER).exists() or shutil.which("dpkg-deb") is None, reason="this system has no apt"
)
RELOCK = "python -m scripts lock base"


class Silent(SimpleHTTPRequestHandler):
    """Serves files of a folder and prints nothing."""

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that a local server offers as Debian's archive."""
    folder = tmp_path / "archive"
    folder.mkdir()
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    direct = tmp_path / "apt.conf"
    direct.write_text('Acquire::http::Proxy::127.0.0.1 "DIRECT";\n', encoding="utf-8")
    monkeypatch.setenv("APT_CONFIG", str(direct))
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Silent, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(debian, "ARCHIVE", f"http://127.0.0.1:{server.server_port}")
        yield folder
        server.shutdown()


def package(archive: Path, name: str, version: str) -> Deb:
    """Add a package to the archive and return it as a lock does."""
    tree = archive.parent / f"{name}-{version}" / "DEBIAN"
    tree.mkdir(parents=True)
    control = f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: t\nDescription: t\n"
    (tree / "control").write_text(control, encoding="utf-8")
    file = archive / f"{name}_{version.rpartition(':')[2]}_all.deb"
    built = ["dpkg-deb", "--build", "--root-owner-group", str(tree.parent), str(file)]
    subprocess.run(built, check=True, capture_output=True)
    return Deb("runtime", name, version, sha256_file(file), file.name.replace("+", "%2b"))


def test_the_repository_has_exactly_the_locked_packages(archive: Path, tmp_path: Path) -> None:
    """Their hashes are those of the lock; every user can read it, whatever the umask."""
    debs = [package(archive, "a", "1:2+b"), package(archive, "c", "3")]
    cache, folder = tmp_path / "cache", tmp_path / "repository"
    folder.mkdir(mode=0o700)
    repository.fetch(debs, cache, RELOCK)
    repository.write(debs, "bookworm", cache, folder)
    index = (folder / "Packages").read_text()
    assert {line for line in index.splitlines() if line.startswith(("Filename", "SHA256", "Version"))} == {
        *("Version: 1:2+b", f"SHA256: {debs[0].sha256}", "Filename: ./a_2+b_all.deb"),
        *("Version: 3", f"SHA256: {debs[1].sha256}", "Filename: ./c_3_all.deb"),
    }
    assert f" {sha256(index)} {len(index)} Packages" in (folder / "Release").read_text()
    assert {path.name for path in folder.iterdir()} == {"Packages", "Release", *(deb.file for deb in debs)}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    assert folder.stat().st_mode & 0o777 == 0o755


def test_what_was_downloaded_is_used_without_the_archive_and_verified(archive: Path, tmp_path: Path) -> None:
    deb, cache = package(archive, "a", "1"), tmp_path / "cache"
    repository.fetch([deb], cache, RELOCK)
    (archive / deb.file).rename(archive / "moved")
    repository.fetch([deb], cache, RELOCK)
    (cache / deb.file).write_bytes(b"damaged")
    with pytest.raises(UserError, match=f"no longer has a=1: run {RELOCK}"):
        repository.fetch([deb], cache, RELOCK)
    (archive / "moved").rename(archive / deb.file)
    repository.fetch([deb], cache, RELOCK)
    assert sha256_file(cache / deb.file) == deb.sha256


def test_packages_that_the_archive_no_longer_has_are_one_line(archive: Path, tmp_path: Path) -> None:
    """The others are kept."""
    debs, cache = [package(archive, name, "1") for name in ("a", "b", "c")], tmp_path / "cache"
    for name in ("b", "c"):
        (archive / f"{name}_1_all.deb").unlink()
    with pytest.raises(UserError) as refused:
        repository.fetch(debs, cache, RELOCK)
    assert str(refused.value) == (
        "Debian's archive no longer has b=1 and 1 more locked packages: "
        "run python -m scripts lock base, commit the lock, and build again"
    )
    assert [file.name for file in cache.iterdir()] == ["a_1_all.deb"]


def test_a_missing_package_is_recognized_by_an_address_with_other_escapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's archive redirects, after which apt also escapes a tilde."""
    deb = Deb("runtime", "libssl3", "3~deb12u2", "0" * 64, "debian/libssl3_3~deb12u2_amd64.deb")
    error = f"E: Failed to fetch {deb.url.replace('~', '%7e')}  404  Not Found [IP: 203.0.113.80 80]\n"
    monkeypatch.setattr(repository, "_download", lambda *_: error)
    with pytest.raises(UserError, match=f"no longer has libssl3=3~deb12u2: run {RELOCK}"):
        repository.fetch([deb], tmp_path, RELOCK)


def test_a_package_with_another_content_is_refused(archive: Path, tmp_path: Path) -> None:
    deb, cache = package(archive, "a", "1"), tmp_path / "cache"
    (archive / deb.file).write_bytes(b"another")
    with pytest.raises(UserError, match=r"a=1 cannot be downloaded: .*Hash Sum mismatch"):
        repository.fetch([deb], cache, RELOCK)
    assert list(cache.iterdir()) == []


def test_an_unreachable_archive_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "ARCHIVE", "http://127.0.0.1:1")
    monkeypatch.setattr(repository, "RETRIES", 0)
    deb = Deb("runtime", "a", "1", "0" * 64, "debian/pool/a_1_all.deb")
    with pytest.raises(UserError, match=r"a=1 cannot be downloaded: check the network and apt's proxy \(E: "):
        repository.fetch([deb], tmp_path, RELOCK)
