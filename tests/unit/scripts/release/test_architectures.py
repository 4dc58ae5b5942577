"""GPU code in libraries: read from fat binaries, bundles and code objects, compared with a cell's GPUs.

The files are made here, byte for byte as nvcc and clang lay them out; the suite `layers` reads real ones.
"""

import ctypes
import struct
import zlib
from pathlib import Path

import msgspec
import pytest

from scripts.matrix.load import find, load
from scripts.matrix.model import WithoutCode, targets
from scripts.release import architectures, image_probe
from scripts.release.image_probe import UnreadableError

CUDA = find(load(), "ray2.12.0-vllm0.4.2-cuda12.1")
ROCM = find(load(), "ray2.12.0-vllm0.4.2-rocm6.1")
TORCH, VLLM = "torch/lib/libtorch_cuda.so", "vllm/_C.cpython-311-x86_64-linux-gnu.so"
COMPLETE = {TORCH: ["sm_80", "sm_90"], VLLM: ["compute_80"]}


def fatbin(*entries: tuple[int, int]) -> bytes:
    """A fat binary as nvcc writes it: kinds and architectures, each with 16 bytes of code."""
    body = b""
    for kind, number in entries:
        header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, 16, 0, 0, 7, 0, number)
        body += header.ljust(64, b"\0") + b"\x7fELF".ljust(16, b"\0")
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def bundle(*targets: str, size: int = 4096) -> bytes:
    """A bundle as clang's offload bundler writes it, with ``size`` bytes of code for each target."""
    names = [
        b"host-x86_64-unknown-linux--",
        *(f"hipv4-amdgcn-amd-amdhsa--{name}".encode() for name in targets),
    ]
    content = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(names))
    for number, name in enumerate(names):
        content += struct.pack("<QQQ", 4096 * (number + 1), size if number else 0, len(name)) + name
    return content + b"code" * 1000


def zstd(content: bytes) -> bytes:
    library = ctypes.CDLL("libzstd.so.1")
    library.ZSTD_compress.restype = ctypes.c_size_t
    room = ctypes.create_string_buffer(len(content) + 1000)
    size = library.ZSTD_compress(room, ctypes.c_size_t(len(room)), content, ctypes.c_size_t(len(content)), 3)
    return room.raw[:size]


def compressed(content: bytes, version: int, method: int) -> bytes:
    """A compressed bundle, with the header of ``version``."""
    packed = zstd(content) if method else zlib.compress(content)
    header = image_probe.COMPRESSED_HEADERS[version]
    sizes = [len(content)] if version == 1 else [header.size + len(packed), len(content)]
    return header.pack(b"CCOB", version, method, *sizes, 0) + packed


def code_object(machine: int) -> bytes:
    """The start of an ELF file of AMD's GPUs, whose flags name ``machine``."""
    return (b"\x7fELF\x02\x01\x01\x40".ljust(16, b"\0") + struct.pack("<HH", 3, 224)).ljust(
        48, b"\0"
    ) + bytes([machine, 5, 0, 0])


def test_architectures_are_read_from_fat_binaries() -> None:
    content = b"\0" * 40 + fatbin((2, 80), (2, 90)) + b"x" * 9 + fatbin((1, 90)) + fatbin((2, 100))
    assert image_probe.by_number(image_probe.architectures(content)) == [
        "compute_90",
        "sm_80",
        "sm_90",
        "sm_100",
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no code",
        b"\x7fELF" * 20,
        b"xCCOBx",
        image_probe.FATBIN,
        fatbin((2, 80))[:40],
        fatbin((9, 80)),
        bundle("gfx942")[:40],
        bundle("gfx942", size=0),
        code_object(0x4C)[:30],
    ],
)
def test_without_complete_code_there_is_no_architecture(content: bytes) -> None:
    assert image_probe.architectures(content) == set()


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("method", image_probe.METHODS)
def test_targets_are_read_from_compressed_bundles(version: int, method: int) -> None:
    """The magic number can be in compressed data, and bundles follow each other."""
    content = compressed(bundle("gfx90a", "gfx942:sramecc+:xnack-"), version, method)
    assert image_probe.architectures(b"\0" * 8 + content) == {"gfx90a", "gfx942"}
    if version > 1:
        both = content + compressed(bundle("gfx9-4-generic"), version, method)
        assert image_probe.architectures(both) == {"gfx90a", "gfx942", "gfx9-4-generic"}


def test_targets_are_read_from_bundles_and_code_objects() -> None:
    content = b"\0" * 8 + bundle("gfx90a") + b"\0" * 8 + bundle("gfx942:xnack+")
    assert image_probe.architectures(content) == {"gfx90a", "gfx942"}
    assert image_probe.architectures(code_object(0x4C)) == {"gfx942"}
    assert image_probe.architectures(code_object(0x77)) == {"gfx:0x77"}


def test_a_broken_compressed_bundle_is_an_error(tmp_path: Path) -> None:
    """It may have code for any GPU, so it does not count as a file without code."""
    for method in image_probe.METHODS:
        (tmp_path / "a.so").write_bytes(compressed(bundle("gfx942"), 2, method)[:40])
        with pytest.raises(UnreadableError, match=r"a\.so: a compressed bundle"):
            image_probe.libraries(tmp_path)


def test_a_folder_of_code_objects_is_one_library(tmp_path: Path) -> None:
    kernels = tmp_path / "hipblaslt" / "library"
    kernels.mkdir(parents=True)
    (kernels / "a_gfx90a.co").write_bytes(code_object(0x3F))
    (kernels / "b.co").write_bytes(compressed(bundle("gfx942"), 3, image_probe.ZSTD))
    (tmp_path / "plain.so").write_bytes(b"\x7fELF no code")
    (tmp_path / "torch.so.1").write_bytes(fatbin((2, 80)))
    (tmp_path / "link.so").symlink_to(tmp_path / "torch.so.1")
    found = image_probe.libraries(tmp_path)
    assert found == {"hipblaslt/library/*.co": {"gfx90a", "gfx942"}, "torch.so.1": {"sm_80"}}


def test_libraries_beside_the_environment_are_read_too(tmp_path: Path) -> None:
    nccl = tmp_path / "nccl" / "lib" / "libnccl.so.2"
    nccl.parent.mkdir(parents=True)
    nccl.write_bytes(fatbin((2, 80)))
    assert image_probe.libraries(tmp_path / "site-packages", tmp_path) == {str(nccl): {"sm_80"}}


@pytest.mark.parametrize(
    ("gpu", "code", "runs"),
    [
        ("sm_86", ["sm_80"], True),  # the same major number
        ("sm_80", ["sm_86"], False),
        ("sm_90", ["sm_80", "sm_89"], False),
        ("sm_90", ["compute_80"], True),  # the driver compiles it
        ("sm_70", ["compute_80"], False),
        ("sm_120", ["sm_100"], False),
        ("gfx942", ["gfx90a"], False),
        ("gfx942", ["gfx9-4-generic"], True),
        ("gfx90a", ["gfx9-4-generic"], False),
        ("gfx942", ["sm_90"], False),
        ("sm_90", ["gfx942", "gfx90a"], False),
    ],
)
def test_a_gpu_runs_code_of_its_own_kind(gpu: str, code: list[str], runs: bool) -> None:
    assert architectures.runs_on(gpu, code) is runs


def test_the_supported_gpus_follow_from_the_range_of_the_matrix() -> None:
    assert targets(CUDA.accelerator) == ("sm_80", "sm_86", "sm_89", "sm_90")
    assert targets(ROCM.accelerator) == ("gfx90a", "gfx942")


def test_a_library_without_code_is_named_unless_the_matrix_has_its_reason() -> None:
    plain = msgspec.structs.replace(CUDA, without_code=())
    assert list(architectures.gaps(plain, COMPLETE)) == []
    libraries = COMPLETE | {"punica/a.so": ["sm_89", "sm_90"]}
    [line] = architectures.gaps(plain, libraries)
    assert line.startswith("punica/a.so: no code for sm_80, sm_86, only for sm_89, sm_90;")
    excuse = WithoutCode(library="punica/*.so", architectures=("sm_80", "sm_86"), reason="r", source="s")
    excused = msgspec.structs.replace(CUDA, without_code=(excuse,))
    assert list(architectures.gaps(excused, libraries)) == []
    [line] = architectures.gaps(excused, COMPLETE)
    assert line.startswith("punica/*.so: no library needs this")
    [line] = architectures.gaps(excused, COMPLETE | {"punica/a.so": ["sm_90"]})
    assert "no code for sm_89, only" in line


def test_operators_without_any_gpu_code_are_named() -> None:
    """They are another platform's: a CPU build of torch, or CUDA's operators on ROCm."""
    lines = list(architectures.gaps(ROCM, {VLLM: ["sm_90"], "rccl.so": ["gfx90a", "gfx942"]}))
    assert lines[0] == "torch/lib/libtorch_hip.so: no GPU code at all"
    assert lines[1].startswith(f"{VLLM}: no code for gfx90a, gfx942, only for sm_90")
