"""A kit of a whole image, for root on a machine that has an NVIDIA GPU and neither Docker nor a network.

An archive of the image's files in pieces, and ``run.sh``, which enters them with chroot and by default climbs
all rungs of certify. So that it can be carried, it has device code for one architecture, and none of what
`OMITTED` names; NVIDIA's CUDA libraries are those of the machine's own torch.
"""

import io
import shlex
import subprocess
import tarfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, cast

from docker import DockerClient
from docker.models.images import Image

from scripts.docker.client import docker_command
from scripts.errors import UserError
from scripts.release import gpu_kit
from scripts.release.image_probe import ELF, FATBIN, HEADER, SHARED, entries

PACKAGES = "opt/venv/lib/python3.11/site-packages/"
NVIDIA = f"{PACKAGES}nvidia/"
MACHINES = ("cu13", "cudnn", "cusparselt", "nvshmem")  # below `NVIDIA`: libraries that the machine has
OMITTED = (
    *(f"{NVIDIA}{name}/lib" for name in MACHINES),
    *(f"{NVIDIA}cu13/{name}" for name in ("bin", "nvvm")),
    *(
        PACKAGES + name
        for name in (
            *("tilelang", "tokenspeed_triton", "nvidia_cutlass_dsl*", "cudnn", "bitsandbytes/*.so"),
            *("cv2", "opencv_python_headless.libs", "torchcodec*", "z3", "wandb/bin", "pip"),
            *("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", "ray/jars", "ray/rllib"),
            *("triton/backends/amd/lib", "triton/backends/nvidia/lib/cupti", "triton/_C/libproton.so"),
            *("torch/include", "torch/bin/[!t]*", "torch/test"),
        )
    ),
    *("*/__pycache__", "usr/share/doc", "usr/share/locale", "usr/share/man"),
    *("dev", "proc", "sys"),
)
COMPRESS = "xz -4 -T0 --block-size=24MiB"  # blocks are unpacked by all cores
SMALLEST = 1_000_000  # bytes of a library whose device code is worth a search
RUN = """\
#!/usr/bin/env bash
# run.sh OUT [COMMAND...]: enter the image whose pieces are in this folder, or in $PIECES, and run a command
# in it as its user, by default certify; it finds the folder OUT as /out. It needs root, bash, tar, xz,
# unshare, a driver, and a python3 with the nvidia-* packages of CUDA 13. The files stay in $KIT_ROOT.
set -euo pipefail
# Mounts in a namespace of their own end with its processes, however these end, and never reach the machine's.
if [ -z "${OWN_MOUNTS:-}" ]; then
    OWN_MOUNTS=1 exec unshare --mount --propagation private bash "${BASH_SOURCE[0]}" "$@"
fi
out=$(realpath -m "$1")
shift
here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
pieces=${PIECES:-$here}
root=${KIT_ROOT:-/var/tmp/rlhf-stack-kit}
packages="$root/@NVIDIA@"
if [ -e "$root" ] && [ "$(stat -c %u "$root")" != "$(id -u)" ]; then
    echo "error: $root belongs to another user: name a folder that does not exist in KIT_ROOT" >&2
    exit 1
fi
if [ -e "$root/ready" ] && ! cmp -s "$here/pieces.sha256" "$root/ready"; then
    echo "error: $root has the files of another kit: delete it, or name a new folder in KIT_ROOT" >&2
    exit 1
fi
if [ ! -e "$root/ready" ]; then
    if [ -n "$(ls -A "$root" 2>/dev/null)" ]; then
        echo "error: $root has other files, or those of an interrupted run.sh: delete it" >&2
        exit 1
    fi
    (cd "$pieces" && sha256sum --check --quiet "$here/pieces.sha256")
    mkdir -p "$root"/{dev,proc,sys,out,usr/local/nvidia}
    cat "$pieces"/piece-* | xz -dc -T0 | tar -x -C "$root"
    ldconfig -p | awk '/libcuda\\.so|libnvidia-(ml|ptxjitcompiler|nvvm|gpucomp)\\.so/ {print $NF}' |
        xargs -r -I {} cp -L {} "$root/usr/local/nvidia/"
    { command -v nvidia-smi || true; } | xargs -r -I {} cp -L {} "$root/usr/local/bin/"
    echo /usr/local/nvidia > "$root/etc/ld.so.conf.d/nvidia.conf"
    chroot "$root" /sbin/ldconfig
    cp /etc/hosts "$root/etc/hosts"
    echo "127.0.0.1 $(hostname)" >> "$root/etc/hosts"
    chmod 1777 "$root/tmp"
    cp "$here/pieces.sha256" "$root/ready"
fi
machine=${NVIDIA_PACKAGES:-$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])')}
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
for name in @MACHINES@; do
    mkdir -p "$packages/$name/lib"
    mount --bind "$machine/$name/lib" "$packages/$name/lib"
done
for name in bin nvvm; do
    mkdir -p "$packages/cu13/$name"
    mount --bind "${CUDA_HOME:-/usr/local/cuda}/$name" "$packages/cu13/$name"
done
mkdir -p "$out"
chown @USER@ "$out"
mount --bind "$out" "$root/out"
[ $# -gt 0 ] || set -- rlhf-stack certify --out /out/certificate
exec chroot --userspec=@USER@:0 "$root" /usr/bin/env -i -C /home/rlhf @ENVIRONMENT@ @ENTRYPOINT@ "$@"
"""


def is_omitted(name: str) -> bool:
    """Whether the kit lacks the file or folder ``name``; static libraries are kept below gcc alone."""
    if name.endswith(".a"):
        return "usr/lib/gcc/" not in name and not name.endswith("_nonshared.a")
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}/*") for pattern in OMITTED)


def keep_device_code(content: bytearray, architecture: int) -> int:
    """Zero the code of other architectures in the fat binaries of a library; return how many bytes.

    PTX of older ones stays, as a GPU can compile it. Entries keep their headers, by which CUDA selects one.
    """
    zeroed, start = 0, content.find(FATBIN)
    while start >= 0:
        at = start + len(FATBIN)
        if start + HEADER.size <= len(content):
            _, version, header, size = HEADER.unpack_from(content, start)
            end = start + header + size
            if version == 1 and header >= HEADER.size and end <= len(content):
                for kind, number, code, length in entries(content, start + header, end):
                    other = number != architecture if kind == ELF else number > architecture
                    if other and code + length <= end:
                        content[code : code + length] = bytes(length)
                        zeroed += length
                at = end
        start = content.find(FATBIN, at)
    return zeroed


def copy(source: tarfile.TarFile, target: tarfile.TarFile, architecture: int) -> None:
    """Copy what is not omitted from the archive of an image's files."""
    for entry in source:
        if is_omitted(entry.name) or (entry.islnk() and is_omitted(entry.linkname)):
            continue
        content = source.extractfile(entry) if entry.isreg() else None
        if content and entry.size >= SMALLEST and SHARED.search(entry.name):
            data = bytearray(content.read())
            keep_device_code(data, architecture)
            content = io.BytesIO(data)
        target.addfile(entry, content)


def run_script(image: Image) -> str:
    """The text of ``run.sh`` for an image, with its user, environment and entrypoint."""
    config = image.attrs["Config"]
    values = {
        "NVIDIA": NVIDIA.rstrip("/"),
        "MACHINES": " ".join(MACHINES),
        "USER": config["User"],
        "ENVIRONMENT": shlex.join(config["Env"]),
        "ENTRYPOINT": shlex.quote(config["Entrypoint"][-1]),
    }
    text = RUN
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def pack(client: DockerClient, image: Image, folder: Path, piece: int, architecture: int) -> list[Path]:
    """Write the kit of an image to ``folder``, which must be new, in pieces of at most ``piece`` bytes."""
    gpu_kit.make(folder)
    container = client.containers.create(image)
    try:
        _export(str(container.id), folder, piece, architecture)
    finally:
        container.remove(force=True)
    pieces = sorted(folder.glob("piece-*"))
    gpu_kit.complete(folder, pieces, run_script(image))
    return pieces


def _export(container: str, folder: Path, piece: int, architecture: int) -> None:
    compress = f"{COMPRESS} | split -b {piece} -d -a 3 - {shlex.quote(str(folder))}/piece-"
    exporting = subprocess.Popen([*docker_command(), "export", container], stdout=subprocess.PIPE)
    writing = subprocess.Popen(["bash", "-o", "pipefail", "-c", compress], stdin=subprocess.PIPE)
    with (
        cast(BinaryIO, exporting.stdout) as files,
        cast(BinaryIO, writing.stdin) as packed,
        tarfile.open(fileobj=files, mode="r|") as source,
        tarfile.open(fileobj=packed, mode="w|") as target,
    ):
        copy(source, target, architecture)
    if exporting.wait() or writing.wait():
        raise UserError(f"{folder}: the kit could not be written")
