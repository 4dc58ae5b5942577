"""The kit of an image has the files that a GPU of one architecture needs, and a script that enters them."""

import io
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace

from scripts.release import image_kit
from scripts.release.image_probe import ELF, ENTRY, FATBIN, HEADER, PTX, architectures

PAYLOAD = b"\xabcode"


def fat_binary(*entries: tuple[int, int]) -> bytes:
    """A fat binary with an entry for each kind and architecture."""
    body = b""
    for kind, number in entries:
        header = bytearray(ENTRY.size)
        ENTRY.pack_into(header, 0, kind, 0x101, ENTRY.size, len(PAYLOAD), number)
        body += header + PAYLOAD
    return HEADER.pack(int.from_bytes(FATBIN, "little"), 1, HEADER.size, len(body)) + body


def test_only_the_code_of_other_architectures_is_zeroed() -> None:
    library = (
        b"text" + fat_binary((ELF, 80), (ELF, 90), (PTX, 80), (PTX, 120)) + fat_binary((ELF, 120)) + b"end"
    )
    content = bytearray(library)
    assert image_kit.keep_device_code(content, 90) == 3 * len(PAYLOAD)
    assert content.count(PAYLOAD) == 2, "sm_90, and PTX from which the driver compiles for it"
    assert architectures(bytes(content)) == architectures(library), "CUDA selects an entry by its header"
    assert content.endswith(b"end")
    assert len(content) == len(library)


def test_a_size_beyond_the_library_is_not_followed() -> None:
    header = HEADER.pack(int.from_bytes(FATBIN, "little"), 1, HEADER.size, 1 << 40)
    content = bytearray(header + bytes(ENTRY.size))
    assert image_kit.keep_device_code(content, 90) == 0


def test_files_of_the_image_are_copied_and_links_to_omitted_ones_are_not() -> None:
    packages = image_kit.PACKAGES
    names = {
        "etc/passwd": True,
        f"{packages}torch/lib/libtorch.so": True,
        f"{packages}nvidia/nccl/lib/libnccl.so.2": True,
        f"{packages}nvidia/cu13/lib/libcublas.so.13": False,
        f"{packages}torch/bin/torch_shm_manager": True,
        f"{packages}torch/bin/protoc": False,
        f"{packages}rlhf_stack/__pycache__/a.pyc": False,
        "usr/lib/gcc/x86_64-linux-gnu/12/libgcc.a": True,
        "usr/lib/x86_64-linux-gnu/libpthread.a": False,
    }
    source, target = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=source, mode="w") as tar:
        folder = tarfile.TarInfo(f"{packages}cv2")  # left empty, it could be imported
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size = len(PAYLOAD)
            tar.addfile(entry, io.BytesIO(PAYLOAD))
        link = tarfile.TarInfo("usr/link")
        link.type, link.linkname = tarfile.LNKTYPE, f"{packages}torch/bin/protoc"
        tar.addfile(link)
    source.seek(0)
    with tarfile.open(fileobj=source) as opened, tarfile.open(fileobj=target, mode="w") as written:
        image_kit.copy(opened, written, 90)
    target.seek(0)
    with tarfile.open(fileobj=target) as kit:
        assert kit.getnames() == [name for name, kept in names.items() if kept]


def test_the_script_has_the_images_environment_and_is_valid(tmp_path: Path) -> None:
    config = {
        "User": "1000",
        "Env": ["PATH=/opt/venv/bin:/bin", "A=two words"],
        "Entrypoint": ["tini", "--", "/enter"],
    }
    text = image_kit.run_script(SimpleNamespace(attrs={"Config": config}))  # type: ignore[arg-type]
    assert "PATH=/opt/venv/bin:/bin 'A=two words' /enter" in text
    assert "--userspec=1000:0" in text
    assert "@" not in text.replace('"$@"', "")
    script = tmp_path / "run.sh"
    script.write_text(text)
    subprocess.run(["bash", "-n", script], check=True)
