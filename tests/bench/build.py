"""Build time and size of a cell against the same requirement list in a plain `pip install` Dockerfile.

``python -m tests.bench.build [--cell CELL] [--json]``; about 20 minutes, network needed.

The peer is what a user would write: the builder root, because DeepSpeed compiles its ops at first use; the
headline pins of the cell and the requirements of OpenRLHF that install without CUDA, by `pip install`; then
the packages removed again that keep the stack from starting. Its image stays tagged as ``PEER`` for
``tests.bench.ready``. Ours is built by ``python -m scripts build``, in a context of its own; the tag of the
cell does not move. A cell whose vLLM is compiled from source has no such peer: ours is measured alone.

- *cold*: no layer and no downloaded package is reused, by either. The machine's network takes part in it.
- *unchanged*: built again at once.
- *OpenRLHF's pin changed*: ours makes the layers from OpenRLHF's up. The peer has one layer for all
  packages, so this is its cold time, not measured again.
- *size*: as `docker image ls` counts it, with the root filesystem.

Compare the ratio, which is of one run; seconds depend on the machine, its load and its network.
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

from scripts.docker.client import connect, docker_command, need_space
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
# Their wheels on the index link CUDA's torch: where that is not there, transformers or vLLM fail on them.
UNLOADABLE = ("torchaudio", "torchcodec", "torchvision")
# No wheel, and its source distribution asks for CUDA's compiler.
UNBUILDABLE = ("flash-attn",)
# Its setup.py downloads from where many builds do not reach: the peer gets an empty package of that name.
UNREACHABLE = {"vllm-nccl-cu12": "2.18.1"}
NOTES = [
    "cold: no layer and no downloaded package is reused, by either; plain pip compiles DeepSpeed's ops "
    "later, whenever they are first used",
    "OpenRLHF's pin changed: plain pip has one layer for all, so this is its cold time",
    "plain pip starts from the root with compilers, because DeepSpeed compiles at first use",
]


def unseen(dockerfile: str) -> str:
    """A Dockerfile of which the builder has no layer yet, though it keeps those that are now made.

    `--no-cache` would not do: the old BuildKit does not find again all that it made so.
    """
    stamp = f"ENV RLHF_STACKS_BENCH={uuid.uuid4().hex}"
    return re.sub(r"(?m)^FROM \$\{.*$", lambda line: f"{line[0]}\n{stamp}", dockerfile)


def without_downloads(dockerfile: str) -> str:
    """Our Dockerfile without its cache of downloaded packages."""
    kept = [line for line in dockerfile.splitlines() if "type=cache,id=rlhf-stacks-uv" not in line]
    return re.sub(
        r"(?m)^( +(?:UV_OFFLINE=1 )?)(/opt/tools/install-layer)$", r"\1UV_NO_CACHE=1 \2", "\n".join(kept)
    )


def requirements(cell: Cell) -> tuple[list[str], str]:
    """What the peer asks pip for, and the pin of OpenRLHF, which is installed without what it requires."""
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
    """What has to be removed again before a plain `pip install` of the cell can import a model."""
    return [item.name for item in cell.excluded if item.name in UNLOADABLE]


def peer_dockerfile(asked: Sequence[str], openrlhf: str, removed: Sequence[str]) -> str:
    """The plain Dockerfile; certificate and pip configuration reach it as secrets too."""
    mounts = (
        "--mount=type=secret,id=ca --mount=type=secret,id=pip --mount=type=bind,source=wheels,target=/wheels"
    )
    pip = "/opt/venv/bin/pip install --no-cache-dir --prefer-binary --find-links /wheels"
    quoted = " ".join(f"'{line}'" for line in asked)
    uninstall = f"RUN /opt/venv/bin/pip uninstall --yes {' '.join(removed)}\n" if removed else ""
    return f"""ARG BASE
FROM ${{BASE}}
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
RUN {mounts} \\
    python3 -m venv /opt/venv && export PIP_CONFIG_FILE=/run/secrets/pip PIP_CERT=/run/secrets/ca && \\
    {pip} {quoted} && {pip} --no-deps {openrlhf}
{uninstall}"""


def place_empty(name: str, version: str, folder: Path) -> None:
    """Write a wheel that has a name and nothing else, so that pip does not look for another."""
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
    """Seconds of a build; a `UserError` with what it printed last if it fails."""
    print(what, "...", file=sys.stderr, flush=True)
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command,
            env={**os.environ, "DOCKER_BUILDKIT": "1"},
            stdout=subprocess.DEVNULL,
            stderr=file,
            check=False,
        )
    if done.returncode:
        raise UserError(f"{what} failed: {build_log.cause(log.read_text(encoding='utf-8'))}")
    return time.monotonic() - start


def size(tag: str) -> float:
    """The size of an image in 10^6 bytes."""
    return unpacked_size(connect().images.get(tag)) / 1e6


def compiled(log: Path) -> float:
    """Seconds of a build that went into DeepSpeed's ops, by its log."""
    lines = log.read_text(encoding="utf-8").splitlines()
    return sum(stage.seconds or 0.0 for stage in build_log.stages(lines) if stage.name.endswith("source"))


def measure_ours(given: Inputs, secrets: Mapping[str, Path], log: Path) -> dict[str, float]:
    """Seconds: cold, the part of it that compiles, unchanged, with a change to what OpenRLHF's layer has."""
    file = given.folder / "Dockerfile"
    file.write_text(unseen(without_downloads(file.read_text(encoding="utf-8"))), encoding="utf-8")
    build = build_command(given, secrets, log.with_suffix(".id"))
    build = [*build[:-1], f"--tag={OURS}", build[-1]]
    seconds = {"cold": timed("ours, cold", build, log), "compiled": compiled(log)}
    seconds["unchanged"] = timed("ours, unchanged", build, log)
    with (given.folder / "requirements" / "openrlhf.txt").open("a", encoding="utf-8") as requirements:
        requirements.write("# changed\n")
    return {**seconds, "changed": timed("ours, OpenRLHF's pin changed", build, log)}


def measure_peer(cell: Cell, folder: Path, secrets: Mapping[str, Path], log: Path) -> dict[str, float]:
    """Seconds: cold, unchanged."""
    folder.mkdir()
    (folder / "wheels").mkdir()
    asked, openrlhf = requirements(cell)
    for wheel in local_wheels(
        lockfile.path(cell).read_text(encoding="utf-8"), index_config.load().find_links
    ):
        place(wheel, folder / "wheels" / wheel.name)
    for name in (item.name for item in cell.excluded if item.name in UNREACHABLE):
        place_empty(name, UNREACHABLE[name], folder / "wheels")
    text = peer_dockerfile(asked, openrlhf, unloadable(cell))
    (folder / "Dockerfile").write_text(unseen(text), encoding="utf-8")
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
    """The command line."""
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
        Row("of it: compiling", "s", ours["compiled"]),
        Row("build, unchanged", "s", ours["unchanged"], peer.get("unchanged")),
        Row("build, OpenRLHF's pin changed", "s", ours["changed"], peer.get("cold")),
        Row("image size", "MB", *sizes),
        Row("image size without its root filesystem", "MB", *map(operator.sub, sizes, roots)),
    ]
    connect().images.remove(OURS)
    show(rows, notes(cell) if has_peer else [], options.json)
    return 0


def notes(cell: Cell) -> list[str]:
    """What to know of the peer."""
    removed = unloadable(cell)
    without = f"plain pip works only without {', '.join(removed)}, removed again in its last step"
    return [*NOTES, without] if removed else NOTES


if __name__ == "__main__":
    run(main)
