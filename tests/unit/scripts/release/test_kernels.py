"""HIP kernels: read from an object that LLVM assembled, and compared with a cell's GPUs."""

import io
import json
import struct
import zipfile
import zlib
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from scripts.cli import app
from scripts.errors import UserError
from scripts.release import image_probe, kernels
from scripts.release.kernels import Kernel

CELL = "ray2.12.0-vllm0.4.2-rocm6.1"
OBJECT = Path(__file__).parent / "code_objects" / "scale-gfx90a.o"
MI200 = OBJECT.read_bytes()
# The same object for the other GPU: its number in the ELF flags, its name in the metadata.
MI300 = (MI200[:48] + b"\x4c" + MI200[49:]).replace(b"gfx90a", b"gfx942")
SCALE = Kernel("scale", "gfx90a", lds=1024, scratch=16, vgpr_spills=3, sgpr_spills=2)
SCALE_942 = msgspec.structs.replace(SCALE, architecture="gfx942")


def library(*objects: bytes) -> bytes:
    """A host's ELF header, then code objects at page boundaries, as a linked fat binary has them."""
    content = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HH", 3, 62)
    for code in objects:
        content = content.ljust(-(-len(content) // 4096) * 4096, b"\0") + code
    return content


def compressed(bundle: bytes) -> bytes:
    packed, header = zlib.compress(bundle), image_probe.COMPRESSED_HEADERS[2]
    return header.pack(b"CCOB", 2, image_probe.ZLIB, header.size + len(packed), len(bundle), 0) + packed


def test_a_kernel_is_read_from_the_metadata_of_an_assembled_object() -> None:
    assert kernels.read(OBJECT) == {OBJECT.name: [SCALE]}


@pytest.mark.parametrize(
    "content", [library(MI200, MI300), compressed(library(MI200, MI300)), library(MI300, compressed(MI200))]
)
def test_kernels_of_every_code_object_of_a_wheel_are_read(tmp_path: Path, content: bytes) -> None:
    wheel = tmp_path / "operators-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/_C.cpython-311-x86_64-linux-gnu.so", content)
        archive.writestr("vllm/host.so", library())
        archive.writestr("vllm/_C.py", content)
    assert kernels.read(wheel) == {"vllm/_C.cpython-311-x86_64-linux-gnu.so": [SCALE, SCALE_942]}


def test_a_kernel_without_a_promised_gpu_is_named() -> None:
    both = ("gfx90a", "gfx942")
    assert list(kernels.problems([SCALE, SCALE_942], both)) == []
    assert list(kernels.problems([SCALE], both)) == ["scale: not compiled for gfx942"]


@pytest.mark.parametrize(("lds", "fits"), [(65536, True), (65537, False)])
def test_a_kernel_has_at_most_the_lds_of_a_workgroup(lds: int, fits: bool) -> None:
    lines = list(kernels.problems([msgspec.structs.replace(SCALE, lds=lds)], ["gfx90a"]))
    assert lines == ([] if fits else ["scale: 65537 bytes of LDS on gfx90a, at most 65536"])


def damaged_wheel() -> bytes:
    """A wheel whose compressed data are invalid."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.so", b"a" * 1000)
    content = bytearray(buffer.getvalue())
    begin = 30 + len("a.so")  # after the header of a file
    content[begin : begin + 8] = b"\xff" * 8
    return bytes(content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.whl", b"no archive"),
        ("b.whl", damaged_wheel()),
        ("a.so", MI200[:200]),
        ("b.so", compressed(MI200)[:60]),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}: damaged"):
        kernels.read(tmp_path / name)


def test_the_command_prints_the_kernels_and_fails_for_a_missing_gpu(tmp_path: Path) -> None:
    (tmp_path / "one.so").write_bytes(library(MI200))
    (tmp_path / "both.so").write_bytes(library(MI200, MI300))
    result = CliRunner().invoke(app, ["kernels", CELL, str(tmp_path / "both.so")])
    assert result.exit_code == 0
    assert [item["architecture"] for item in json.loads(result.output)["both.so"]] == ["gfx90a", "gfx942"]
    result = CliRunner().invoke(app, ["kernels", CELL, str(tmp_path / "one.so")])
    assert result.exit_code == 1
    assert "one.so: scale: not compiled for gfx942" in result.output


@pytest.mark.parametrize(
    ("cell", "reason"), [(CELL, "no HIP kernels"), ("ray2.55.0-vllm0.29.0-cpu", "name a ROCm cell")]
)
def test_without_kernels_or_a_rocm_cell_the_command_says_what_is_wrong(
    tmp_path: Path, cell: str, reason: str
) -> None:
    (tmp_path / "host.so").write_bytes(library())
    result = CliRunner().invoke(app, ["kernels", cell, str(tmp_path / "host.so")])
    assert isinstance(result.exception, UserError)
    assert reason in str(result.exception)
