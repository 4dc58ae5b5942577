"""Wheels as files in memory: read, and written so that the same content gives the same bytes."""

import base64
import csv
import hashlib
import io
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

FIRST_ZIP_DATE = 315532800  # 1980-01-01, the oldest that a zip file can express


@dataclass(frozen=True)
class WheelFile:
    """A file in a wheel; ``mode`` holds its permission bits."""

    content: bytes
    mode: int


Files = dict[str, WheelFile]


def read_wheel(wheel: Path) -> Files:
    """The files of a wheel by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            entry.filename: WheelFile(archive.read(entry), (entry.external_attr >> 16) & 0o777 or 0o644)
            for entry in archive.infolist()
            if not entry.is_dir()
        }


def write_wheel(files: Files, info: str, target: Path) -> Path:
    """Write a wheel whose dist-info folder is ``info``, with a RECORD made from ``files``.

    Files are sorted, share one date and are stored: deflate differs between versions of zlib.
    """
    record = f"{info}/RECORD"
    listing = io.StringIO()
    rows = csv.writer(listing, lineterminator="\n")
    for name, entry in sorted(files.items()):
        if name != record:
            rows.writerow((name, record_hash(entry.content), len(entry.content)))
    rows.writerow((record, "", ""))
    files = files | {record: WheelFile(listing.getvalue().encode(), 0o644)}
    date = time.gmtime(FIRST_ZIP_DATE)[:6]
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


def split_name(wheel: str) -> tuple[str, str, str]:
    """The distribution, version and tags (with a build number, if any) in the file name of a wheel."""
    distribution, version, tags = wheel.removesuffix(".whl").split("-", 2)
    return distribution, version, tags


def record_hash(content: bytes) -> str:
    """The digest of a file as RECORD has it."""
    encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return "sha256=" + encoded.rstrip(b"=").decode()
