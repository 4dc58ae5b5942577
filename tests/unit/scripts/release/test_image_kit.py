"""The kit of an image has the files that a GPU of one architecture needs, and a script that enters them."""

import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

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


CONFIG = {
    "User": "1000",
    "Env": ["PATH=/opt/venv/bin:/bin", "A=two words"],
    "Entrypoint": ["tini", "--", "/enter"],
}
# A namespace whose mounts are shared, as systemd's are, and not those of this machine.
SHARED = ("unshare", "--mount", "--propagation", "private", "bash", "-c")
TWICE = """
mount --make-rshared /
bash "$1/run.sh" "$1/out" cp /dev/null /proc/self/status /out && bash "$1/run.sh" "$1/out" cp /etc/hosts /out
cat /proc/self/mountinfo
"""


def script() -> str:
    return image_kit.run_script(SimpleNamespace(attrs={"Config": CONFIG}))  # type: ignore[arg-type]


def add_programs(root: Path) -> None:
    """Copy the programs that the script and the test run in an image, with their libraries."""
    programs = [found for name in ("env", "sh", "cp", "ldconfig") if (found := shutil.which(name))]
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    libraries = re.findall(r"(/\S+) \(0x", listed)
    for name, folder in (*((one, "usr/bin") for one in programs), *((one, "") for one in libraries)):
        target = root / (f"{folder}/{Path(name).name}" if folder else name[1:])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, target)
    for link in ("bin", "sbin"):
        (root / link).symlink_to("usr/bin")


@pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run([*SHARED, ""], capture_output=True, check=False).returncode != 0,
    reason="needs root and the right to mount",
)
def test_no_mount_of_the_script_remains_and_those_of_the_machine_do(tmp_path: Path) -> None:
    image, kit = tmp_path / "image", tmp_path / "kit"
    for folder in ("etc/ld.so.conf.d", "home/rlhf", "usr/local/bin", "tmp"):
        (image / folder).mkdir(parents=True)
    add_programs(image)
    enter = image / "enter"
    enter.write_text('#!/bin/sh\nexec "$@"\n')
    enter.chmod(0o755)
    kit.mkdir()
    with tarfile.open(kit / "piece-000", "w:xz") as pieces:
        pieces.add(image, ".")
    digest = hashlib.sha256((kit / "piece-000").read_bytes()).hexdigest()
    (kit / "pieces.sha256").write_text(f"{digest}  piece-000\n")
    (kit / "run.sh").write_text(script())
    folders = {"NVIDIA_PACKAGES": image_kit.MACHINES, "CUDA_HOME": ("bin", "nvvm")}
    for name, parts in folders.items():
        for part in parts:
            (tmp_path / name / part / "lib").mkdir(parents=True)
    variables = {name: str(tmp_path / name) for name in (*folders, "KIT_ROOT")}
    done = subprocess.run(
        [*SHARED, TWICE, "bash", kit], capture_output=True, text=True, env=os.environ | variables, check=False
    )
    assert {path.name for path in (kit / "out").iterdir()} == {"null", "status", "hosts"}, done.stderr
    mounted = {line.split()[4] for line in done.stdout.splitlines()}
    assert not {one for one in mounted if one.startswith(str(tmp_path))}
    assert "/dev/pts" in mounted
    assert list((tmp_path / "KIT_ROOT" / "dev").iterdir()) == []
    with (kit / "pieces.sha256").open("a") as other:
        other.write(f"{digest}  piece-001\n")
    for error in ("has the files of another kit", "or those of an interrupted run.sh"):
        refused = subprocess.run(
            ["bash", kit / "run.sh", kit / "out"],
            capture_output=True,
            text=True,
            env=os.environ | variables,
            check=False,
        )
        assert (refused.returncode, refused.stderr.count(error)) == (1, 1), refused.stderr
        (tmp_path / "KIT_ROOT" / "ready").unlink(missing_ok=True)


def test_the_script_has_the_images_environment_and_is_valid(tmp_path: Path) -> None:
    text = script()
    assert "PATH=/opt/venv/bin:/bin 'A=two words' /enter" in text
    assert "--userspec=1000:0" in text
    assert "@" not in text.replace('"$@"', "")
    file = tmp_path / "run.sh"
    file.write_text(text)
    subprocess.run(["bash", "-n", file], check=True)
