"""What a root filesystem is, whichever tools wrote it."""

import io
import tarfile
from pathlib import Path

from scripts.images import rootfs

EPOCH = 1_000_000_000


def tar(path: Path, folder_time: int, form: int) -> Path:
    """A small root with one of each kind of file."""
    with tarfile.open(path, "w", format=form) as archive:
        for name, kind in {"./d": tarfile.DIRTYPE, "./d/f": tarfile.REGTYPE, "./l": tarfile.SYMTYPE,
                           "./h": tarfile.LNKTYPE}.items():  # fmt: skip
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.mtime = kind, 0o755, 5
            member.linkname = "./d/f" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            if kind == tarfile.DIRTYPE:
                member.mtime = folder_time
            member.size = 3 if kind == tarfile.REGTYPE else 0
            archive.addfile(member, io.BytesIO(b"abc") if member.size else None)
    return path


def test_who_wrote_a_root_is_not_seen_in_it(tmp_path: Path) -> None:
    first = tar(tmp_path / "first", 7, tarfile.GNU_FORMAT)
    second = tar(tmp_path / "second", 8, tarfile.PAX_FORMAT)
    assert first.read_bytes() != second.read_bytes()
    for path in (first, second):
        rootfs.normalise(path, path.with_suffix(".tar"), EPOCH)
    assert first.with_suffix(".tar").read_bytes() == second.with_suffix(".tar").read_bytes()


def test_what_a_root_holds_stays(tmp_path: Path) -> None:
    source, target = tar(tmp_path / "source", 7, tarfile.GNU_FORMAT), tmp_path / "target"
    rootfs.normalise(source, target, EPOCH)
    with tarfile.open(target) as archive:
        found = {member.name: (member.type, member.mtime, member.linkname) for member in archive}
        file = archive.extractfile("./d/f")
        assert file is not None
        assert file.read() == b"abc"
    assert found == {
        "./d": (tarfile.DIRTYPE, EPOCH, ""),
        "./d/f": (tarfile.REGTYPE, 5, ""),
        "./l": (tarfile.SYMTYPE, 5, "./d/f"),
        "./h": (tarfile.LNKTYPE, 5, "./d/f"),
    }


def test_why_a_user_cannot_make_a_root_is_message() -> None:
    message = rootfs.reason(
        "I: x\nE: unable to pick chroot mode automatically (use --mode for manual selection)"
    )
    assert "uidmap" in message
    assert "log in again" in message
