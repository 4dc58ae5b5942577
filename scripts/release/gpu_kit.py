"""A kit of `rlhf_stack` for a machine that has torch and a GPU but no image: ``python -m scripts gpu-kit``.

An archive in pieces, a list of their digests, and ``run.sh``, which needs bash, tar and a python3 with torch.
"""

import gzip
import io
import json
import tarfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import packaging

from scripts.digests import sha256
from scripts.errors import UserError
from scripts.paths import ROOT

RUNTIME = ROOT / "images" / "runtime"
PACKAGE = RUNTIME / "rlhf_stack"
DIGEST_FILE = "kit.json"  # read by rlhf_stack.certify.kit
RUN = """\
#!/usr/bin/env bash
# run.sh [FOLDER]: checks and unpacks the pieces next to it, and writes the certificate to FOLDER, a new one.
# It needs bash, tar, and python3 3.11 or newer with torch; the rung memory also needs transformers.
set -euo pipefail
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 needed: " + sys.version)'
out=$(realpath -m "${1:-certificate}")
cd "$(dirname "${BASH_SOURCE[0]}")"
sha256sum --check --quiet pieces.sha256
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat piece-* | tar --extract --gzip --directory "$work"
PYTHONPATH="$work${PYTHONPATH:+:$PYTHONPATH}" python3 -m rlhf_stack.certify.kit "$out"
"""


def files(package: Path = PACKAGE) -> dict[str, bytes]:
    """The files of `rlhf_stack`, by their paths in the kit."""
    return {
        str(path.relative_to(package.parent)): path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def digest(content: Mapping[str, bytes]) -> str:
    """The digest of the files of a kit, which its certificate names."""
    return sha256(msgspec.json.encode({name: sha256(data) for name, data in content.items()}, order="sorted"))


def wheel_files(wheels: Sequence[Path]) -> dict[str, bytes]:
    """The files in ``wheels``, of packages that the other machine lacks; `UserError` if one is no wheel."""
    found: dict[str, bytes] = {}
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                found |= {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
        except OSError as error:
            raise UserError(f"{wheel}: {error.strerror or error}") from None
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise UserError(f"{wheel}: not a wheel, or damaged: {error}") from None
    return found


def archive(content: Mapping[str, bytes]) -> bytes:
    """A tar.gz of these files that depends on nothing else."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name, data in sorted(content.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def pack(folder: Path, piece: int, wheels: Sequence[Path] = ()) -> list[Path]:
    """Write the kit to ``folder``, which must be new, in pieces of at most ``piece`` bytes; return these."""
    own = files()
    name = json.dumps({"digest": digest(own)}).encode()
    needed = files(Path(packaging.__file__).parent)
    packed = archive(wheel_files(wheels) | needed | own | {DIGEST_FILE: name})
    make(folder)
    parts = [packed[start : start + piece] for start in range(0, len(packed), piece)]
    digits = len(str(len(parts)))
    pieces = [folder / f"piece-{number:0{digits}}" for number in range(len(parts))]
    for path, data in zip(pieces, parts, strict=True):
        path.write_bytes(data)
    complete(folder, pieces, RUN)
    return pieces


def make(folder: Path) -> None:
    """Make the ``folder`` of a kit, which must be new."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{folder} exists already") from None


def complete(folder: Path, pieces: Sequence[Path], script: str) -> None:
    """Write the digests of the pieces of a kit, and ``script`` as its ``run.sh``."""
    lines = (f"{sha256(path.read_bytes())}  {path.name}\n" for path in pieces)
    (folder / "pieces.sha256").write_text("".join(lines), encoding="utf-8")
    (folder / "run.sh").write_text(script, encoding="utf-8")
