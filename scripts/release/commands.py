"""``catalogue``, ``certificates``, ``fault-table``, ``gpu-kit``, ``kernels``, ``publish`` and ``soaks``."""

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from scripts.docker.client import connect
from scripts.errors import UserError
from scripts.matrix.commands import Check, written
from scripts.matrix.load import expand, find, load
from scripts.matrix.model import targets
from scripts.release import catalogue, certificates, fault_cases, gpu_kit, image_kit, kernels, soaks
from scripts.release.publish import publish_cells
from scripts.testing.in_image import local_image


def register(app: typer.Typer) -> None:
    """Add the commands of this package to ``app``."""
    app.command("catalogue")(write_catalogue)
    app.command("fault-table")(write_fault_table)
    app.command("soaks")(add_soaks)
    app.command("kernels")(inspect_kernels)
    app.command("publish")(publish)
    app.command("gpu-kit")(pack_gpu_kit)
    group = typer.Typer(help="Add certificates of `rlhf-stack certify`.")
    group.command("add")(add_certificate)
    group.command("schema")(write_certificate_schema)
    app.add_typer(group, name="certificates")


def write_catalogue(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if a file or an image disagrees.")
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not measure the local images; use the recorded facts.")
    ] = False,
) -> int:
    """Measure the local images; write images/catalogue.json, images/README.md and the README's table."""
    reasons = catalogue.check(offline) if check else catalogue.write(offline)
    for line in catalogue.unverified() if check else ():
        print(line)
    for reason in reasons:
        print(reason, file=sys.stderr)
    return 1 if reasons else 0


def write_fault_table() -> None:
    """Merge the results of the suite faults into images/faults.json and rewrite the catalogue's page."""
    cases = fault_cases.update()
    catalogue.write(offline=True)
    print(f"{fault_cases.MERGED.name}: {cases} cases")


def add_soaks() -> None:
    """Add the reports of tests.bench.soak to images/soaks and rewrite the catalogue's page."""
    added = soaks.add()
    catalogue.write(offline=True)
    print(f"{soaks.COMMITTED.name}: {added} new")


def inspect_kernels(
    cell: Annotated[str, typer.Argument(metavar="CELL", help="A ROCm cell, whose GPUs are required.")],
    path: Annotated[
        Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A wheel, .so or code object.")
    ],
) -> int:
    """Print as JSON the HIP kernels of a compiled file; exit 1 if one lacks a GPU or exceeds its LDS."""
    accelerator = find(load(), cell).accelerator
    if accelerator.kind != "rocm":
        raise UserError(f"{cell} has no HIP kernels: name a ROCm cell")
    found = kernels.read(path)
    if not found:
        raise UserError(f"{path}: no HIP kernels")
    print(msgspec.json.encode(found).decode())
    reasons = [
        f"{name}: {reason}"
        for name, code in found.items()
        for reason in kernels.problems(code, targets(accelerator))
    ]
    for reason in reasons:
        print(reason, file=sys.stderr)
    return 1 if reasons else 0


def publish(
    repository: Annotated[
        str, typer.Argument(metavar="REGISTRY/REPO", help="Such as ghcr.io/you/rlhf-stacks.")
    ],
    cells: Annotated[
        list[str] | None,
        typer.Option(
            "--cell", metavar="CELL", help="A cell id [all cells that are built from public packages]."
        ),
    ] = None,
) -> int:
    """Push the tested images of cells to a registry."""
    matrix = load()
    if cells:
        return publish_cells(repository, [find(matrix, name) for name in dict.fromkeys(cells)])
    code = publish_cells(repository, [cell for cell in expand(matrix) if not cell.sources])
    omitted = ", ".join(cell.id for cell in expand(matrix) if cell.sources)
    print(f"without --cell not published, since packages of AMD are needed to build them: {omitted}")
    return code


def add_certificate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="certificate.json, next to its folder of records.")
    ],
    note: Annotated[
        str, typer.Option(metavar="TEXT", help="What a reader of the catalogue must know about the run.")
    ] = "",
) -> None:
    """Check a certificate, its records and, if FILE.sig is there, its signature; add it to the catalogue."""
    print(certificates.add(file, certificates.known_subjects(), note=note))
    catalogue.write(offline=True)


def write_certificate_schema(check: Check = False) -> int:
    """Write docs/certificate.schema.json."""
    return written(certificates.SCHEMA_FILE, certificates.schema(), "certificates schema", check)


def pack_gpu_kit(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="A new folder.")] = Path("build/gpu-kit"),
    piece: Annotated[
        int, typer.Option(metavar="MB", min=1, help="The most that a piece has, in 10^6 bytes.")
    ] = 48,
    wheels: Annotated[
        list[Path] | None,
        typer.Option("--wheel", metavar="FILE", help="Also contain this wheel; repeatable."),
    ] = None,
    cell: Annotated[
        str | None,
        typer.Option(
            metavar="CELL",
            help="Pack this cell's image instead, for root on a machine with CUDA 13.",
        ),
    ] = None,
    architecture: Annotated[
        int, typer.Option(metavar="NUMBER", min=50, max=999, help="With --cell: of the GPU, 90 for sm_90.")
    ] = 90,
) -> None:
    """Pack the rungs of certify that need only torch, for a machine with a GPU and without Docker."""
    if cell:
        if wheels:
            raise UserError("--wheel: an image has all packages")
        chosen = find(load(), cell)
        if not chosen.accelerator.name.startswith("cuda13"):
            raise UserError(f"--cell {cell}: a kit takes the libraries of CUDA 13 from the other machine")
        client = connect()
        image = client.images.get(local_image(client, chosen))
        pieces = image_kit.pack(client, image, out, piece * 10**6, architecture)
    else:
        pieces = gpu_kit.pack(out, piece * 10**6, wheels or ())
    print(f"pieces of at most {piece} MB: {len(pieces)}, in {out}; there: bash {out.name}/run.sh FOLDER")
