"""The locked Debian packages of a base: version, sha256 and path in Debian's archive.

The lock of a base is ``images/locks/<base>.txt``. When it is written, apt verifies Debian's signatures; a
build verifies each package's sha256 instead, and so needs neither the signatures nor the newest versions.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import requests

from scripts.errors import UserError
from scripts.locks import lockfile
from scripts.matrix.load import Matrix
from scripts.matrix.model import Base, Toolchain
from scripts.processes import captured

ARCHIVE = "http://deb.debian.org"  # has Debian's security archive too
SECURITY = "http://security.debian.org"  # in apt's sources, as Debian's documentation prescribes
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# What mmdebstrap's variant `minbase` adds. Without usr-is-merged apt selects its alternative usrmerge, a
# one-time converter that requires perl.
MINIMAL = ("?essential", "?priority(required)", "apt", "usr-is-merged")
RUNTIME, BUILDER, UNPACKED = "runtime", "builder", "unpacked"
UNSTABLE = "sid"  # Debian's only release without updates of its own
# Otherwise apt takes from Debian's release `experimental` only what no other release has.
EQUAL = "Package: *\nPin: release *\nPin-Priority: 500\n"
LIMIT_SECONDS, ANSWER_SECONDS = 600, 60
LOCKED = re.compile(
    r"(?P<root>\S+) (?P<name>\S+)=(?P<version>\S+) "
    r"sha256:(?P<sha256>[0-9a-f]{64}) (?P<path>\S+)"
)
FOUND = re.compile(
    rf"'({re.escape(ARCHIVE)}|{re.escape(SECURITY)})/(?P<path>[^']+)' "
    r"(?P<name>[^_]+)_(?P<version>[^_]+)_\S+ \d+ SHA256:(?P<sha256>[0-9a-f]{64})"
)


@dataclass(frozen=True)
class Deb:
    """A package of a base; ``root`` is the smallest root that has it.

    That is `RUNTIME`, `BUILDER`, or for what a variant adds to the builder root, the variant's name. The
    files of an `UNPACKED` one are in the root of a toolchain, without what it depends on.
    """

    root: str
    name: str
    version: str
    sha256: str
    path: str

    @property
    def url(self) -> str:
        """Its address in Debian's archive."""
        return f"{ARCHIVE}/{self.path}"

    @property
    def file(self) -> str:
        """The name of its file."""
        return unquote(Path(self.path).name)

    @property
    def line(self) -> str:
        """Its line of the lock."""
        return f"{self.root} {self.name}={self.version} sha256:{self.sha256} {self.path}"


def path(base: Base) -> Path:
    """Return the path of a base's lock."""
    return lockfile.LOCKS / f"{base.name}.txt"


def parse(text: str) -> tuple[Deb, ...]:
    """Return the packages of a lock, in its order; `ValueError` for a line that locks no package."""
    return tuple(_deb(line) for line in text.splitlines() if not line.startswith("#"))


def versions(text: str) -> dict[str, str]:
    """Return the locked versions by package."""
    return {deb.name: deb.version for deb in parse(text)}


def sources(base: Base) -> str:
    """Return apt's list of Debian's archives, a line each."""
    places = [f"{ARCHIVE}/debian {base.suite}"]
    if base.suite != UNSTABLE:
        places += [
            f"{ARCHIVE}/debian {base.suite}-updates",
            f"{SECURITY}/debian-security {base.suite}-security",
        ]
    places += [f"{ARCHIVE}/debian {suite}" for suite in (base.also if isinstance(base, Toolchain) else ())]
    return "".join(f"deb {place} main\n" for place in places)


def roots(matrix: Matrix, base: Base) -> dict[str, tuple[str, ...]]:
    """Return the packages of each root of a base, smallest first, under the name that `Deb.root` has."""
    runtime = tuple(package.name for package in base.runtime)
    if isinstance(base, Toolchain):
        return {RUNTIME: runtime, UNPACKED: tuple(package.name for package in base.unpacked)}
    builder = runtime + tuple(package.name for package in base.builder)
    return {RUNTIME: runtime, BUILDER: builder} | {
        variant.name: builder + tuple(package.name for package in variant.builder)
        for variant in matrix.variants
        if variant.base == base.name and variant.builder
    }


def minimal(base: Base) -> tuple[str, ...]:
    """Return what `MINIMAL` selects among the packages of the base's own suite, as mmdebstrap does."""
    if not isinstance(base, Toolchain):
        return MINIMAL
    return tuple(
        f"?narrow(?codename(^{base.suite}$),{name})" if name.startswith("?") else name for name in MINIMAL
    )


def question(base: Base, wanted: Mapping[str, Sequence[str]]) -> str:
    """Return all that the matrix says about a lock, as text; ``wanted`` are the `roots`."""
    lines = [f"{root}: {' '.join((*minimal(base), *names))}\n" for root, names in wanted.items()]
    return f"{base.architecture}\n{sources(base)}{''.join(lines)}"


def resolve(base: Base, wanted: Mapping[str, Sequence[str]]) -> str:
    """Return the content of a lock as of now; `UserError` without an answer of apt or Debian's keys."""
    if not KEYRING.exists():
        raise UserError(f"{base.name} cannot be locked: sudo apt-get install debian-archive-keyring")
    locked: list[Deb] = []
    with tempfile.TemporaryDirectory() as folder:
        options = _private(base, Path(folder))
        _apt(base, [*options, "-o=APT::Update::Error-Mode=any", "update"])
        for root, names in wanted.items():
            found = _found(root, base, options, names)
            below = {deb.path: deb for deb in locked if deb.root in (RUNTIME, BUILDER)}
            if root != UNPACKED and (dropped := sorted(below.keys() - found.keys())):
                raise UserError(f"{base.name}: the packages of {root} exclude {below[dropped[0]].name}")
            locked += [deb for path, deb in found.items() if path not in below]
    return "".join(f"{deb.line}\n" for deb in sorted(locked, key=lambda deb: (deb.name, deb.root)))


def removed(old: str, new: str) -> list[str]:
    """Return which packages of a lock are neither in its ``new`` text nor in Debian's archive any more.

    `UserError` if the archive cannot be reached.
    """
    known = set(parse(new))
    return [f"{deb.name}={deb.version}" for deb in parse(old) if deb not in known and not _is_offered(deb)]


def _is_offered(deb: Deb) -> bool:
    try:
        answer = requests.head(deb.url, timeout=ANSWER_SECONDS, allow_redirects=True)
        if answer.status_code != requests.codes.not_found:
            answer.raise_for_status()
    except requests.RequestException as error:
        raise UserError(f"Debian's archive cannot be reached: {error}") from None
    return answer.ok


def _deb(line: str) -> Deb:
    locked = LOCKED.fullmatch(line)
    if locked is None:
        raise ValueError(f"not a locked Debian package: {line!r}")
    return Deb(**locked.groupdict())


def _private(base: Base, folder: Path) -> list[str]:
    """Return options with which apt knows Debian's archives and a system without packages, in ``folder``."""
    for name in ("etc/apt/preferences.d", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial"):
        (folder / name).mkdir(parents=True)
    signed = sources(base).replace("deb ", f"deb [signed-by={KEYRING}] ")
    (folder / "etc" / "apt" / "sources.list").write_text(signed, encoding="utf-8")
    (folder / "status").touch()
    if isinstance(base, Toolchain):
        (folder / "etc" / "apt" / "preferences.d" / "releases").write_text(EQUAL, encoding="utf-8")
    settings = {
        "Dir": folder,
        "Dir::State::status": folder / "status",
        "Dir::Bin::methods": "/usr/lib/apt/methods",
        "APT::Architecture": base.architecture,
        "APT::Architectures": base.architecture,
        "APT::Sandbox::User": "root",  # of this folder
        "Acquire::Languages": "none",
        "Acquire::ForceHash": "SHA256",
        "Acquire::Retries": "3",
        # A mirror may have an older state of Debian's unstable releases; no image contains any of it.
        "Acquire::Check-Valid-Until": str(not isinstance(base, Toolchain)).lower(),
    }
    return ["--quiet", "--quiet", "--yes", *(f"-o={name}={value}" for name, value in settings.items())]


def _found(root: str, base: Base, options: Sequence[str], names: Iterable[str]) -> dict[str, Deb]:
    """Return what an installation of packages needs, or the packages to unpack, by path in the archive."""
    wanted = ("download", *names) if root == UNPACKED else ("install", *minimal(base), *names)
    command = [*options, "--no-install-recommends", "--print-uris", *wanted]
    found = [match.groupdict() for match in map(FOUND.match, _apt(base, command).splitlines()) if match]
    return {item["path"]: Deb(root=root, **item | {"version": unquote(item["version"])}) for item in found}


def _apt(base: Base, arguments: Sequence[str]) -> str:
    """Run apt-get and return what it prints; `UserError` with its first error."""
    try:
        environment = {**os.environ, "LC_ALL": "C.UTF-8"}
        done = captured(["apt-get", *arguments], env=environment, timeout=LIMIT_SECONDS)
    except FileNotFoundError:
        raise UserError(f"{base.name} can be locked only where apt-get is available") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"Debian's archive did not answer within {LIMIT_SECONDS} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("E:")] or [done.stderr.strip()]
        raise UserError(f"{base.name} cannot be locked: {errors[0]}")
    return done.stdout
