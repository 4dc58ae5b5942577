"""Build time and size of a cell compared with the same requirements in a plain `pip install` Dockerfile.

``python -m tests.bench.build [--cell CELL] [--json]``; about 20 minutes, network needed.

The peer is what a user would write: the builder root, because DeepSpeed compiles its ops at first use; the
headline pins of the cell and the requirements of OpenRLHF that install without CUDA, by `pip install`; then
the removal of packages that prevent the stack from starting. Its image stays tagged as ``PEER`` for
``tests.bench.ready``. Ours is built by ``python -m scripts build``, in a separate context; the tag of the
cell does not move. A cell whose vLLM is compiled from source has no such peer: only ours is measured.

- *cold*: neither reuses a layer or a downloaded package. It includes downloads over the machine's network.
- *unchanged*: rebuilt immediately.
- *OpenRLHF's pin changed*: ours rebuilds the layers from OpenRLHF's upwards. The peer has one layer for all
  packages, so its cold time is used, not measured again.
- *size*: as `docker image ls` counts it, with the root filesystem.

Compare the ratios, which are from one run; seconds depend on the machine, its load and its network.
"""

import operator
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path

from scripts.docker.client import build_environment, connect, docker_command, need_space
from scripts.errors import UserError, run
from scripts.images import build_log, rootfs
from scripts.images.build import build_command, unpacked_size, write_secrets
from scripts.images.context import place
from scripts.images.inputs import Inputs, collect
from scripts.images.pins import local_wheels
from scripts.locks import index_config, lockfile
from scripts.matrix.load import Cell, find, load
from scripts.patches.pristine import fetch_pristine, locked_hashes
from scripts.paths import ROOT
from tests.bench.results import Row, parser, show

PEER = "rlhf-stacks-bench:plain-pip"
OURS = "rlhf-stacks-bench:ours"
FREE_MEGABYTES = 20_000
# Their wheels on the index link CUDA's torch: without it, transformers or vLLM fail to import them.
UNLOADABLE = ("torchaudio", "torchcodec", "torchvision")
# It has no wheel, and its source distribution requires CUDA's compiler.
UNBUILDABLE = ("flash-attn",)
# Its setup.py downloads from a host that many builds cannot reach: the peer gets an empty package instead.
UNREACHABLE = {"vllm-nccl-cu12": "2.18.1"}
NOTES = [
    "cold: neither reuses a layer or a downloaded package; plain pip compiles DeepSpeed's ops later, "
    "at their first use",
    "OpenRLHF's pin changed: plain pip has one layer for all packages, so this is its cold time",
    "plain pip starts from the root with compilers, because DeepSpeed compiles at first use",
]


def uncached(dockerfile: str) -> str:
    """Return a Dockerfile none of whose layers the builder has cached; the new layers are cached.

    `--no-cache` does not serve: an old BuildKit does not reuse all layers that it built with it.
    """
    stamp = f"ENV RLHF_STACKS_BENCH={uuid.uuid4().hex}"
    return re.sub(r"(?m)^FROM \$\{.*$", lambda line: f"{line[0]}\n{stamp}", dockerfile)


def without_downloads(dockerfile: str) -> str:
    """Return our Dockerfile without its caches of downloaded packages and of wheels built from source."""
    lines = [line for line in dockerfile.splitlines() if "type=cache,id=rlhf-stacks-uv" not in line]
    text = re.sub(
        r"(?m)^( +(?:UV_OFFLINE=1 )?)(/opt/tools/install-layer)$", r"\1UV_NO_CACHE=1 \2", "\n".join(lines)
    )
    return text.replace("type=cache,id=rlhf-stacks-wheels,", "type=tmpfs,")


def requirements(cell: Cell) -> tuple[list[str], str]:
    """Return the peer's requirements, and the pin of OpenRLHF, which is installed without dependencies."""
    pins = {package.name: package.requirement for package in cell.packages}
    openrlhf, version = pins.pop("openrlhf"), cell.versions["openrlhf"]
    hashes = locked_hashes("openrlhf", version, lockfile.path(cell).read_text(encoding="utf-8"))
    with zipfile.ZipFile(fetch_pristine("openrlhf", version, hashes)) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        declared = HeaderParser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist", [])
    others = [line for line in declared if ";" not in line]
    rest = [line for line in others if re.split(r"[^\w-]", line)[0] not in {*pins, *UNBUILDABLE}]
    return [*pins.values(), *rest, "rich"], openrlhf


def unloadable(cell: Cell) -> list[str]:
    """Return the packages whose removal lets a plain `pip install` of the cell import a model."""
    return [item.name for item in cell.excluded if item.name in UNLOADABLE]


def peer_dockerfile(requirements: Sequence[str], openrlhf: str, removed: Sequence[str]) -> str:
    """Return the plain Dockerfile; it too gets certificate and pip configuration as secrets."""
    mounts = (
        "--mount=type=secret,id=ca --mount=type=secret,id=pip --mount=type=bind,source=wheels,target=/wheels"
    )
    pip = "/opt/venv/bin/pip install --no-cache-dir --prefer-binary --find-links /wheels"
    quoted = " ".join(f"'{line}'" for line in requirements)
    uninstall = f"RUN /opt/venv/bin/pip uninstall --yes {' '.join(removed)}\n" if removed else ""
    return f"""ARG BASE
FROM ${{BASE}}
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
RUN {mounts} \\
    python3 -m venv /opt/venv && export PIP_CONFIG_FILE=/run/secrets/pip PIP_CERT=/run/secrets/ca && \\
    {pip} {quoted} && {pip} --no-deps {openrlhf}
{uninstall}"""


def place_empty(name: str, version: str, folder: Path) -> None:
    """Write an empty wheel of this name, so that pip does not look for another."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)


def timed(what: str, command: Sequence[str], log: Path) -> float:
    """Return the seconds of a build; `UserError` with the cause in its log if it fails."""
    print(what, "...", file=sys.stderr, flush=True)
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command,
            env=build_environment(os.environ),
            stdout=subprocess.DEVNULL,
            stderr=file,
            check=False,
        )
    if done.returncode:
        raise UserError(f"{what} failed: {build_log.cause(log.read_text(encoding='utf-8'))}")
    return time.monotonic() - start


def size(tag: str) -> float:
    """Return the size of an image in 10^6 bytes."""
    return unpacked_size(connect().images.get(tag)) / 1e6


def compiled(log: Path) -> float:
    """Return the seconds in which a build compiled DeepSpeed's ops, from its log."""
    lines = log.read_text(encoding="utf-8").splitlines()
    return sum(stage.seconds or 0.0 for stage in build_log.stages(lines) if stage.name.endswith("source"))


def measure_ours(inputs: Inputs, secrets: Mapping[str, Path], log: Path) -> dict[str, float]:
    """Return seconds: cold, of these compiling, unchanged, and with a change to the layer of OpenRLHF."""
    file = inputs.folder / "Dockerfile"
    file.write_text(uncached(without_downloads(file.read_text(encoding="utf-8"))), encoding="utf-8")
    build = build_command(inputs, secrets, log.with_suffix(".id"))
    build = [*build[:-1], f"--tag={OURS}", build[-1]]
    seconds = {"cold": timed("ours, cold", build, log), "compiled": compiled(log)}
    seconds["unchanged"] = timed("ours, unchanged", build, log)
    with (inputs.folder / "requirements" / "stack.txt").open("a", encoding="utf-8") as requirements:
        requirements.write("# changed\n")
    return {**seconds, "changed": timed("ours, OpenRLHF's pin changed", build, log)}


def measure_peer(cell: Cell, folder: Path, secrets: Mapping[str, Path], log: Path) -> dict[str, float]:
    """Return seconds: cold, unchanged."""
    folder.mkdir()
    (folder / "wheels").mkdir()
    pins, openrlhf = requirements(cell)
    for wheel in local_wheels(
        lockfile.path(cell).read_text(encoding="utf-8"), index_config.load().find_links
    ):
        place(wheel, folder / "wheels" / wheel.name)
    for name in (item.name for item in cell.excluded if item.name in UNREACHABLE):
        place_empty(name, UNREACHABLE[name], folder / "wheels")
    text = peer_dockerfile(pins, openrlhf, unloadable(cell))
    (folder / "Dockerfile").write_text(uncached(text), encoding="utf-8")
    build = [
        *docker_command(),
        "build",
        "--progress=plain",
        f"--tag={PEER}",
        f"--build-arg=BASE={rootfs.image(rootfs.roots(cell)[1])}",
        *(f"--secret=id={name},src={path}" for name, path in secrets.items()),
        str(folder),
    ]
    seconds = timed("plain pip, cold", build, log)
    return {"cold": seconds, "unchanged": timed("plain pip, unchanged", build, log)}


def main() -> int:
    """Run the command line."""
    options = parser("build", __doc__).parse_args()
    matrix = load()
    cell = find(matrix, options.cell or matrix.default)
    has_peer = all(build.package != "vllm" for build in cell.build_from_source)
    need_space(FREE_MEGABYTES)
    config = index_config.load()
    with tempfile.TemporaryDirectory(dir=ROOT / "build", prefix="bench-") as temporary:
        folder = Path(temporary)
        secrets = write_secrets(config, folder)
        peer = measure_peer(cell, folder / "peer", secrets, folder / "peer.log") if has_peer else {}
        ours = measure_ours(collect(cell, config, folder), secrets, folder / "ours.log")
    sizes = [size(OURS), *([size(PEER)] if has_peer else [])]
    roots = [size(rootfs.image(root)) for root in rootfs.roots(cell)]
    rows = [
        Row("cold build", "s", ours["cold"], peer.get("cold")),
        Row("cold build: compiling", "s", ours["compiled"]),
        Row("build, unchanged", "s", ours["unchanged"], peer.get("unchanged")),
        Row("build, OpenRLHF's pin changed", "s", ours["changed"], peer.get("cold")),
        Row("image size", "MB", *sizes),
        Row("image size without its root filesystem", "MB", *map(operator.sub, sizes, roots)),
    ]
    connect().images.remove(OURS)
    show(rows, notes(cell) if has_peer else [], options.json)
    return 0


def notes(cell: Cell) -> list[str]:
    """Return the notes on the peer."""
    removed = unloadable(cell)
    without = f"plain pip works only without {', '.join(removed)}, which its last step removes"
    return [*NOTES, without] if removed else NOTES


if __name__ == "__main__":
    run(main)
