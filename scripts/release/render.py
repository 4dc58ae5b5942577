"""The catalogue as Markdown: the README's table of cells, and the page with all of each image."""

from collections.abc import Iterable, Mapping, Sequence

from scripts.errors import UserError
from scripts.matrix.load import Cell
from scripts.release import facts, fault_cases
from scripts.release.facts import Facts, Suite
from scripts.release.fault_cases import Case
from scripts.release.markdown import table_of
from scripts.testing import records

BEGIN, END = "<!-- cells: written by python -m scripts.release.catalogue -->", "<!-- end of cells -->"
PACKAGES = {"openrlhf": "OpenRLHF", "ray": "Ray", "vllm": "vLLM", "deepspeed": "DeepSpeed", "torch": "torch"}
COLUMNS = ("cell", *PACKAGES.values(), "image", "not shown", "supported until")
NOT_BUILT = "not built yet"
UNKNOWN = "?"
SUITES = {
    "image": "in a container of the image: as its own user, then as an unknown one on a read-only root",
    "layers": "of the image from outside: size, labels, base, no secret in a layer",
    "patches": "each patch's probe, on the package as released and on ours",
    "cluster": "simulated: several Ray nodes in one container",
    "integration": "simulated: a step of training on up to four nodes of eight GPUs, engines up to TP 8; "
    "what reaches the device is replaced in images for GPUs, and with vLLM 0.4.2 for engines above TP 1",
    "network": "several containers as nodes, each with its own address",
    "registry": "pushed to a registry, pulled by digest; an image built FROM it",
    "demo": "a training run on CPU, on two containers as nodes",
    "faults": "a training run on four containers that a fault hits; what became of it stands below",
}
INTRODUCTION = """# The images

Written by `nox -s catalogue` from the images that were built and from the records of their tests; nothing
here is written by hand. A cell is one image, its id is its tag. `nox -s publish` pushes it as
`<release>-<cell>`, which never moves, and as `<cell>`, which moves to the newest release; there is no
`latest`. *Image* is the id of the image that was measured and tested, *shared* what other cells of this page
have too, so that a second pull does not move it. Sizes are of unpacked layers, 1 MB is 10^6 bytes.

No image was run on a GPU for this page. The architectures are those for which the compiled code in the
image was made: torch says its own, those of vLLM and xformers are read from their shared objects (`compute_`
is PTX, which newer GPUs compile; `sm_90a` is read as `sm_90`).
"""


def row(cell: Cell, known: Mapping[str, Facts]) -> tuple[str, ...]:
    """What a reader of the README has to know of a cell, in the order of `COLUMNS`."""
    name = f"`{cell.id}`{' (default)' if cell.is_default else ''}"
    versions = [_version(cell, package) for package in PACKAGES]
    return (name, *versions, _state(known.get(cell.id)), cell.tested.unverified, str(cell.support.until))


def filled(text: str, cells: Iterable[Cell], known: Mapping[str, Facts]) -> str:
    """The README's ``text`` with the table between the markers; a `UserError` without both, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(f"README.md: expected the lines {BEGIN!r} and {END!r}")
    table = table_of(COLUMNS, (row(cell, known) for cell in cells))
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


def page(cells: Sequence[Cell], known: Mapping[str, Facts], tried: Sequence[Case] = ()) -> str:
    """The text of ``images/README.md``."""
    overview = table_of(
        ("cell", "image", "size", "shared", "own", "accelerator", "architectures", "supported"),
        (_overview(cell, known) for cell in cells),
    )
    suites = table_of(("suite", "what is tested, and where"), SUITES.items())
    sections = "\n".join(_section(cell, known.get(cell.id)) for cell in cells)
    found = f"{fault_cases.section(tried)}\n" if tried else ""
    return f"{INTRODUCTION}\n{overview}\n## How they were tested\n\n{suites}\n{found}{sections}"


def _overview(cell: Cell, known: Mapping[str, Facts]) -> tuple[str, ...]:
    link = f"[`{cell.id}`](#{cell.id.replace('.', '').lower()})"
    support = f"{cell.support.since} to {cell.support.until}"
    measured = known.get(cell.id)
    if measured is None:
        return link, NOT_BUILT, *[UNKNOWN] * 3, cell.accelerator.kind, UNKNOWN, support
    common = facts.shared(cell.id, known)
    parts = (UNKNOWN, UNKNOWN) if common is None else (megabytes(common), megabytes(measured.size - common))
    image = f"`{measured.image.removeprefix('sha256:')[:12]}`{' **stand-in**' if measured.stand_in else ''}"
    return (
        link,
        image,
        megabytes(measured.size),
        *parts,
        cell.accelerator.kind,
        _architectures(measured) or "none: CPU",
        support,
    )


def _section(cell: Cell, measured: Facts | None) -> str:
    versions = ", ".join(f"{package.name} {_version(cell, package.name)}" for package in cell.packages)
    env = table_of(
        ("default", "reason", "source"),
        ((f"`{item.name}={item.value}`", item.reason, item.source) for item in cell.env),
    )
    lines = [f"## {cell.id}\n", f"{versions}.\n"]
    lines += _measured(cell, measured) if measured else [f"{NOT_BUILT.capitalize()} from these versions.\n"]
    lines += [f"Not shown: {cell.tested.unverified}.\n", env]
    return "\n".join(lines)


def _measured(cell: Cell, measured: Facts) -> list[str]:
    dirty = ", **with uncommitted changes**" if measured.revision.endswith(records.DIRTY) else ""
    lines = [
        f"Image `{measured.image}`, of commit {measured.revision.removesuffix(records.DIRTY)[:12]}{dirty}.\n"
    ]
    if measured.stand_in:
        lines.append(f"**A stand-in**, for tests, which is not published: {measured.stand_in}.\n")
    suites = [(name, *_counts(measured.suites[name])) for name in SUITES if name in measured.suites]
    absent = [name for name in records.required(cell) if name not in measured.suites]
    if suites:
        lines.append(table_of(("suite", "outcome", "passed", "failed", "skipped", "seconds"), suites))
    if absent:
        lines.append(f"Not run on this image: {', '.join(absent)}.\n")
    if measured.patches:
        patches = ((f"`{name}`", *_proof(measured, name)) for name in measured.patches)
        lines.append(table_of(("patch", "as released", "patched"), patches))
    return [*lines, f"Shown: {cell.tested.verified}.\n"]


def _counts(suite: Suite) -> tuple[str, ...]:
    return suite.outcome, str(suite.passed), str(suite.failed), str(suite.skipped), f"{suite.seconds:.0f}"


def _proof(measured: Facts, patch: str) -> tuple[str, str]:
    proved = measured.proofs.get(patch)
    return (proved.pristine, proved.patched) if proved else ("not tried on this image", UNKNOWN)


def _architectures(measured: Facts) -> str:
    return "; ".join(f"{name}: {', '.join(found)}" for name, found in sorted(measured.architectures.items()))


def megabytes(size: int) -> str:
    """A size in bytes as 10^6 of them."""
    return f"{size / 1e6:.0f} MB"


def _state(measured: Facts | None) -> str:
    """Whether an image was built and what its tests said, in a few words."""
    if measured is None:
        return NOT_BUILT
    failed = sorted(name for name, suite in measured.suites.items() if suite.outcome != "passed")
    passed = sum(suite.passed for suite in measured.suites.values())
    tested = (
        f"failed: {', '.join(failed)}" if failed else f"{passed} tests passed" if passed else "not tested"
    )
    kind = "stand-in, " if measured.stand_in else ""
    return f"{kind}{megabytes(measured.size)}, {tested}"


def _version(cell: Cell, name: str) -> str:
    """A version, and where it comes from if that is not the project itself."""
    package = cell.package(name)
    return (
        package.version if package.distribution == name else f"{package.version} (`{package.distribution}`)"
    )
