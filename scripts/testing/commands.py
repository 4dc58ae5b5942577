"""``python -m scripts test``, ``suites``, ``demo`` and ``known-bad``."""

import contextlib
from typing import Annotated

import docker
import docker.errors
import msgspec
import typer

from scripts.docker.client import connect
from scripts.errors import UserError
from scripts.images.inputs import INPUTS
from scripts.locks import preflight
from scripts.matrix.load import Cell, find, load
from scripts.matrix.suites import SUITES
from scripts.testing import demo, in_image, known_bad, older_image, on_host, plans, side_by_side
from scripts.testing.cluster import sweep

PYTEST_SUITES = [name for name, suite in SUITES.items() if suite.place != "command"]
Again = Annotated[bool, typer.Option("--again", help="Repeat suites that passed before on the same image.")]
CellId = Annotated[str | None, typer.Argument(metavar="CELL", help="A cell id [the default cell].")]


def register(app: typer.Typer) -> None:
    """Add this package's commands to ``app``."""
    app.command("test", context_settings={"ignore_unknown_options": True})(run_test)
    app.command("suites")(run_suites)
    app.command("demo")(run_demo)
    app.command("known-bad")(check_known_bad)


def run_test(
    suite: Annotated[str, typer.Argument(help=f"One of {', '.join(PYTEST_SUITES)}.", metavar="SUITE")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CELL PYTEST-ARGUMENTS",
            help="A cell id [the default cell], and arguments for pytest, with which no record is written.",
        ),
    ] = None,
    tag: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Another image of the cell: pulled, or made FROM it.")
    ] = None,
    derived: Annotated[
        bool, typer.Option("--derived", help="The image is made FROM ours and may have more packages.")
    ] = False,
    again: Again = False,
) -> int:
    """Run a test suite on the image of a cell, unless the same tests passed before on the same image."""
    if tag is not None and not tag.strip():
        raise UserError("--tag: expected the name of an image")
    if suite not in PYTEST_SUITES:
        raise UserError(f"no test suite {suite!r}: choose from {', '.join(PYTEST_SUITES)}")
    arguments = list(words or ())
    named = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    cell, client = _cell(named), connect()
    on_the_host = SUITES[suite].place == "host"
    if on_the_host and (tag or derived):
        raise UserError(f"--tag and --derived are for suites inside the image, which {suite} is not")
    image = in_image.local_image(client, cell, tag)
    if tag and not derived:
        _refuse_derived(client, cell, tag)
    if tag is None and (older := older_image.warning(cell, client.images.get(image).labels)):
        print(older, flush=True)
    if on_the_host:
        return on_host.run_suite(client, cell, suite, arguments, again)
    sweep(client)
    run = in_image.Run(suite, image, tag or cell.tag, derived, tuple(arguments), again)
    return in_image.run_all(client, cell, run)


def _refuse_derived(client: docker.DockerClient, cell: Cell, tag: str) -> None:
    """Raise a `UserError` for an image made FROM the cell's: it inherits the labels that a record names.

    Only layers tell them apart, and only if the cell's image of the same inputs is here.
    """
    with contextlib.suppress(docker.errors.ImageNotFound):
        given, own = client.images.get(tag), client.images.get(cell.tag)
        more = len(given.attrs["RootFS"]["Layers"]) > len(own.attrs["RootFS"]["Layers"])
        if more and given.labels.get(INPUTS) == own.labels.get(INPUTS):
            raise UserError(f"{tag} has more layers than {cell.tag}, it was made FROM it: add --derived")


def run_suites(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="SUITE:CELL", help="Suites on images that are built.")
    ] = None,
    default: Annotated[
        bool, typer.Option("--default", help="Lint, unit tests, build and suites of the default cell.")
    ] = False,
    ci: Annotated[
        bool, typer.Option("--ci", help="Build the cells with ci_suites in matrix.yaml and run these.")
    ] = False,
    release: Annotated[
        bool, typer.Option("--release", help="Lint, unit tests, build and all suites of every cell.")
    ] = False,
    checks: Annotated[
        bool, typer.Option("--checks", help="Lint and unit tests, recorded for the commit.")
    ] = False,
    again: Again = False,
) -> int:
    """Run suites, two at a time; name them, or choose one of the options."""
    if bool(words) + default + ci + release + checks != 1:
        raise UserError("expected SUITE:CELL... or one of --default, --ci, --release and --checks")
    matrix = load()
    if default:
        matrix = msgspec.structs.replace(matrix, default=preflight.default_cell(matrix).id)
    if checks:
        return plans.run(plans.for_checks())
    if words:
        return plans.run_side_by_side(side_by_side.parse(words, matrix), again)
    plan = plans.for_default if default else plans.for_submission if ci else plans.for_release
    return plans.run(plan(matrix), again)


def run_demo(
    cell: CellId = None,
    layout: Annotated[
        str,
        typer.Option(
            help="separate: trainer and engines on different GPUs; the image has hybrid and spread too."
        ),
    ] = demo.LAYOUT,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = demo.STEPS,
    seed: Annotated[int, typer.Option(help="Seed of the model and the run.")] = demo.SEED,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time limit of the training job.")
    ] = demo.TIMEOUT,
    again: Again = False,
) -> None:
    """Build a cell and train with it on two containers as two nodes; the result is recorded."""
    chosen = _cell(cell) if cell is not None else preflight.default_cell(load())
    demo.run_demo(chosen, layout, steps, seed, timeout, again=again)


def check_known_bad(cell: CellId = None) -> int:
    """Check which rows of the known-bad database still apply; exit code 1 if one does not."""
    return known_bad.check(_cell(cell))


def _cell(cell_id: str | None) -> Cell:
    matrix = load()
    return find(matrix, matrix.default if cell_id is None else cell_id)
