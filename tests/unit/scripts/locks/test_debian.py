"""Locks of Debian packages: written from apt's answer, compared with the matrix and with Debian's archive."""

import re
from pathlib import Path
from unittest.mock import MagicMock

import msgspec
import pytest
import requests

from scripts.errors import UserError
from scripts.locks import commands, debian, lockfile, targets
from scripts.locks.debian import Deb
from scripts.matrix.load import load
from scripts.matrix.model import Base, Toolchain

MATRIX = load()
BASES = MATRIX.bases
BASE = BASES[0]
WANTED = debian.roots(MATRIX, BASE)
SHA = "0" * 64
TEXT = debian.path(BASE).read_text(encoding="utf-8")


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.name)
def test_each_base_is_locked_with_all_packages_that_the_matrix_names(base: Base) -> None:
    locked = {deb.name: deb.root for deb in targets.locked_debs(MATRIX, base)}
    assert {locked[package.name] for package in base.runtime} == {"runtime"}
    assert {package.name for package in base.builder} <= set(locked)
    assert {"libc6", "dpkg", "apt", "usr-is-merged"} <= set(locked)


def test_a_lock_names_no_address() -> None:
    assert "://" not in TEXT.partition("\n")[2]


def test_a_line_that_locks_nothing_is_an_error() -> None:
    assert debian.parse(f"# header\nruntime a=1:2 sha256:{SHA} debian/pool/a_2_all.deb\n")[0].version == "1:2"
    with pytest.raises(ValueError, match="not a locked Debian package: 'runtime a=1'"):
        debian.parse("runtime a=1\n")


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An apt-get whose answer for a root is in a file of the returned folder; ``update`` succeeds."""
    script = tmp_path / "apt-get"
    script.write_text(
        f"""#!/bin/sh
case " $* " in
    *" update "*) ;;
    *" download "*) cat {tmp_path}/unpacked ;;
    *" g++ "*) cat {tmp_path}/builder ;;
    *) cat {tmp_path}/runtime ;;
esac
""",
        encoding="utf-8",
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(debian, "KEYRING", script)
    return tmp_path


def printed(host: str, path: str, file: str) -> str:
    """A line that ``apt-get --print-uris install`` prints."""
    return f"'http://{host}/{path}' {file} 1234 SHA256:{SHA}\n"


def test_a_lock_has_the_epoch_and_the_root_of_each_package(apt: Path) -> None:
    """The address lacks the epoch; the name of apt's own file has it."""
    first = printed("security.debian.org", "debian-security/pool/b_2%2bx_amd64.deb", "b_1%3a2+x_amd64.deb")
    second = printed("deb.debian.org", "debian/pool/a_1_all.deb", "a_1_all.deb")
    (apt / "runtime").write_text(first, encoding="utf-8")
    (apt / "builder").write_text(first + second, encoding="utf-8")
    wanted = (
        Deb("builder", "a", "1", SHA, "debian/pool/a_1_all.deb"),
        Deb("runtime", "b", "1:2+x", SHA, "debian-security/pool/b_2%2bx_amd64.deb"),
    )
    assert debian.parse(debian.resolve(BASE, WANTED)) == wanted
    assert wanted[1].file == "b_2+x_amd64.deb"


def test_a_builder_root_without_a_package_of_the_runtime_root_is_refused(apt: Path) -> None:
    (apt / "runtime").write_text(printed("deb.debian.org", "debian/pool/a_1_all.deb", "a_1_all.deb"))
    (apt / "builder").write_text("")
    with pytest.raises(UserError, match=r"the packages of builder exclude a$"):
        debian.resolve(BASE, WANTED)


def test_an_error_of_apt_is_one_line(apt: Path) -> None:
    (apt / "apt-get").write_text(
        "#!/bin/sh\necho 'W: x' >&2; echo 'E: Unable to locate tini' >&2; exit 100\n"
    )
    with pytest.raises(UserError, match=r"^debian12 cannot be locked: E: Unable to locate tini$"):
        debian.resolve(BASE, WANTED)


def test_without_debians_keys_nothing_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "KEYRING", tmp_path / "none")
    with pytest.raises(UserError, match="apt-get install debian-archive-keyring"):
        debian.resolve(BASE, WANTED)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock of a base in a folder that tests can change."""
    copy = tmp_path / debian.path(BASE).name
    copy.write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(lockfile, "LOCKS", tmp_path)
    monkeypatch.setattr(targets, "ROOT", tmp_path)
    return copy


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("tini=", "tini=9", "was edited by hand"),
        ("Input sha256: ", "Input sha256: 0", "does not match its input"),
    ],
)
def test_a_changed_lock_is_reported_without_an_archive(
    project: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, why: str
) -> None:
    assert commands.lock([BASE.name], check=True, offline=True) == 0
    project.write_text(TEXT.replace(old, new), encoding="utf-8")
    assert commands.lock([BASE.name], check=True, offline=True) == 1
    line = f"{project.name} {why}: run python -m scripts lock {BASE.name}"
    assert capsys.readouterr().err == f"{line}\n"
    with pytest.raises(UserError, match=line):
        targets.locked_debs(MATRIX, BASE)


def test_another_package_in_the_matrix_needs_another_lock() -> None:
    changed = msgspec.structs.replace(BASE, runtime=BASE.runtime[1:])
    with pytest.raises(UserError, match="does not match its input"):
        targets.locked_debs(MATRIX, changed)


@pytest.mark.parametrize(
    ("status", "why"),
    [(404, r" \(tini .+ -> 9; no longer available: tini=.+\)"), (200, r" \(tini .+ -> 9\)")],
)
def test_a_newer_package_is_reported_and_whether_the_locked_one_is_still_available(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, status: int, why: str
) -> None:
    [tini] = [deb for deb in debian.parse(TEXT) if deb.name == "tini"]
    newer = TEXT.partition("\n")[2].replace(f"tini={tini.version}", "tini=9")
    answer = requests.Response()
    answer.status_code = status
    head = MagicMock(return_value=answer)
    monkeypatch.setattr(debian, "resolve", lambda *_: newer)
    monkeypatch.setattr(requests, "head", head)
    assert commands.lock([BASE.name], check=True) == 1
    line = capsys.readouterr().err
    assert line.startswith(f"{project.name} is stale")
    assert re.search(why, line)
    assert [call.args for call in head.mock_calls] == [(tini.url,)], (
        "only packages that are not the newest can be gone"
    )


@pytest.mark.parametrize(
    ("toolchain", "last", "archives"),
    list(zip(MATRIX.toolchains, ("bookworm", "experimental"), (4, 3), strict=True)),
)
def test_a_toolchain_has_packages_of_several_releases_and_some_without_what_they_need(
    toolchain: Toolchain, last: str, archives: int
) -> None:
    listed = debian.sources(toolchain).splitlines()
    assert (listed[-1], len(listed)) == (f"deb http://deb.debian.org/debian {last} main", archives)
    wanted = debian.roots(MATRIX, toolchain)
    assert set(wanted) == {"runtime", "unpacked"}
    assert f"runtime: ?narrow(?codename(^{toolchain.suite}$),?essential) " in debian.question(
        toolchain, wanted
    )
    locked = targets.locked_debs(MATRIX, toolchain)
    assert {deb.name for deb in locked if deb.root == "unpacked"} == set(wanted["unpacked"])
    assert set(wanted["runtime"]) <= {deb.name for deb in locked if deb.root == "runtime"}


@pytest.mark.parametrize("base", [BASE, *MATRIX.toolchains])
def test_releases_of_a_toolchain_have_equal_priority_and_may_be_of_an_old_mirror(
    base: Base, tmp_path: Path
) -> None:
    options = debian._private(base, tmp_path)
    priorities = [file.read_text() for file in (tmp_path / "etc/apt/preferences.d").iterdir()]
    assert priorities == ([debian.EQUAL] if isinstance(base, Toolchain) else [])
    assert (f"-o=Acquire::Check-Valid-Until={str(base is BASE).lower()}") in options


def test_packages_to_unpack_are_downloaded_without_what_they_depend_on(apt: Path) -> None:
    (apt / "runtime").write_text(printed("deb.debian.org", "debian/pool/a_1_all.deb", "a_1_all.deb"))
    (apt / "unpacked").write_text(printed("deb.debian.org", "debian/pool/b_1_all.deb", "b_1_all.deb"))
    found = debian.parse(debian.resolve(BASE, {"runtime": ("a",), "unpacked": ("b",)}))
    assert [(deb.root, deb.name) for deb in found] == [("runtime", "a"), ("unpacked", "b")]
