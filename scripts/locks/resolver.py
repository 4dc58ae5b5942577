"""Resolve requirements with uv to exact versions with hashes.

The index and the folders of local wheels are those of the user's pip configuration. Extra indexes are not
queried: uv takes a package from the first index that has it, and an index without upload times defeats
``exclude_newer``, so the answer would depend on the machine. The answer contains no address and no path of
this machine.
"""

import datetime
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from uv import find_uv_bin

from scripts.errors import UserError
from scripts.locks import index_config
from scripts.matrix.model import Base
from scripts.processes import captured

NEVER = "python_version < '3.0'"
ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
PASSED_ON = (
    *("UV_CACHE_DIR", "UV_HTTP_RETRIES", "UV_HTTP_TIMEOUT"),
    *("UV_KEYRING_PROVIDER", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS"),
)
UNREACHABLE = (
    *("error sending request", "Failed to fetch", "dns error", "Could not connect", "client error"),
    *("credentials", "Unauthorized", "Forbidden"),
)
UNRESOLVED = "cannot be resolved"
LIMIT_SECONDS, FIND_SECONDS = 900, 60


@dataclass(frozen=True)
class Question:
    """Requirements (pip's format) for a Python and a platform, with the index as of 00:00 UTC of a day.

    ``name`` names the requirements in the answer. ``sources`` are the packages for which source distributions
    are allowed; without a platform the answer is valid on all platforms, and every package may be one.
    Folders of local wheels are searched only for ``local`` versions: otherwise a CPU build in such a folder
    would satisfy the pin of a CUDA build. ``alone`` excludes dependencies.
    """

    name: str
    requirements: str
    python: str
    exclude_newer: datetime.date
    platform: str | None = None
    overrides: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    local: bool = False
    alone: bool = False


def platform(base: Base) -> str:
    """Return uv's name of the platform of a base."""
    return f"{ARCHITECTURES[base.architecture]}-manylinux_{base.glibc.replace('.', '_')}"


def command(question: Question, config: index_config.PipConfig) -> list[str]:
    """Return the uv command for a question whose files are in the working directory."""
    target = (
        [f"--python-platform={question.platform}", "--only-binary=:all:"]
        if question.platform
        else ["--universal"]
    )
    return [
        find_uv_bin(),
        "pip",
        "compile",
        "--quiet",
        "--no-config",
        "--no-header",
        "--generate-hashes",
        f"--python={sys.executable}",
        f"--python-version={question.python}",
        f"--exclude-newer={question.exclude_newer}T00:00:00Z",
        "--override=overrides",
        *target,
        *(["--no-deps"] if question.alone else []),
        *(f"--no-binary={name}" for name in question.sources),
        *([f"--default-index={config.index}"] if config.index else []),
        *(f"--find-links={place}" for place in (*config.find_links, *config.links) if question.local),
        *(f"--allow-insecure-host={host}" for host in config.trusted),
        question.name,
    ]


def answer(question: Question) -> str:
    """Return the hashed requirements for a question; `UserError` without a solution or an index."""
    config = index_config.load()
    overrides = [*question.overrides, *(f"{name} ; {NEVER}" for name in question.excluded)]
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder, question.name)
        requirements.write_text(question.requirements, encoding="utf-8")
        Path(folder, "overrides").write_text("".join(f"{line}\n" for line in overrides), encoding="utf-8")
        done = _run(command(question, config), question.name, config, folder, LIMIT_SECONDS)
    if done.returncode:
        raise UserError(explain(question.name, done.stderr))
    return done.stdout


def finds(requirement: str, python: str, platform: str) -> bool:
    """Return whether pip's configuration finds a wheel of a hashed requirement.

    Indexes, folders and pages of wheels are searched as by a build, and only metadata is downloaded.
    `UserError` if an index cannot be reached.
    """
    config = index_config.load()
    name = requirement.partition(" ")[0]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "wanted").write_text(requirement, encoding="utf-8")
        arguments = [
            *(find_uv_bin(), "pip", "install", "--quiet", "--dry-run", "--no-config", "--no-deps"),
            *("--require-hashes", "--only-binary=:all:", "--requirement=wanted", "--target=none"),
            *(f"--python={sys.executable}", f"--python-version={python}", f"--python-platform={platform}"),
            *([f"--default-index={config.index}"] if config.index else []),
            *(f"--index={url}" for url in config.extra),
            "--index-strategy=unsafe-best-match",
            *(f"--find-links={place}" for place in (*config.find_links, *config.links)),
            *(f"--allow-insecure-host={host}" for host in config.trusted),
        ]
        done = _run(arguments, name, config, folder, FIND_SECONDS)
    if done.returncode and any(sign in done.stderr for sign in UNREACHABLE):
        raise UserError(explain(name, done.stderr))
    return done.returncode == 0


def _run(
    arguments: list[str], name: str, config: index_config.PipConfig, folder: str, seconds: int
) -> subprocess.CompletedProcess[str]:
    try:
        return captured(arguments, folder, environment(config), seconds)
    except subprocess.TimeoutExpired:
        raise UserError(f"{name}: the index did not answer within {seconds} s") from None


def environment(config: index_config.PipConfig) -> dict[str, str]:
    """Return the environment of uv: the caller's without uv's own settings, with certificates and proxy."""
    variables = {
        name: value for name, value in config.environment().items() if name[:3] != "UV_" or name in PASSED_ON
    }
    if config.certificate:
        variables.setdefault("SSL_CERT_FILE", str(config.certificate))
    if config.client:
        variables.setdefault("SSL_CLIENT_CERT", str(config.client))
    return variables


def explain(name: str, errors: str) -> str:
    """Return the error that uv printed as one line."""
    line = re.sub(r"\s+", " ", errors).strip().removeprefix("error: ")
    if any(sign in errors for sign in UNREACHABLE):
        advice = "check the network, the proxy, credentials and `pip config get global.index-url`"
        return f"the package index cannot be reached for {name}: {advice} ({line[:160]})"
    return f"{name} {UNRESOLVED}: {line[:600]}"
