"""The user's pip configuration: index, local wheels, certificate. Builds receive it as secrets."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CERTIFICATES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
SYSTEM_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True)
class PipConfig:
    """URLs of the indexes, local folders with wheels (``find_links``), and the CA bundle."""

    index: str | None = None
    extra: tuple[str, ...] = ()
    find_links: tuple[Path, ...] = ()
    certificate: Path | None = None

    def portable(self) -> str:
        """Return a pip.conf for any machine: with addresses, without paths."""
        lines = ["[global]"]
        if self.index:
            lines.append(f"index-url = {self.index}")
        if self.extra:
            lines.append(f"extra-index-url = {' '.join(self.extra)}")
        return "\n".join(lines) + "\n"


def parse(listing: str, environment: Mapping[str, str]) -> PipConfig:
    """Parse the output of ``pip config list``, in which variables are ``:env:`` entries."""
    values: dict[str, str] = {}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in ("global", ":env:", "install") and (section == ":env:" or name not in values):
            values[name] = value.strip("'\"")
    links = [Path(word.removeprefix("file://")) for word in _words(values.get("find-links", ""))]
    certificates = [
        values.get("cert", ""),
        *(environment.get(name, "") for name in CERTIFICATES),
        str(SYSTEM_BUNDLE),
    ]
    return PipConfig(
        index=values.get("index-url") or None,
        extra=tuple(
            word for word in _words(values.get("extra-index-url", "")) if not word.startswith("file:")
        ),
        find_links=tuple(path for path in links if path.is_dir()),
        certificate=next((Path(path) for path in certificates if path and Path(path).is_file()), None),
    )


def _words(value: str) -> Sequence[str]:
    return value.replace("\\n", " ").split()


def load() -> PipConfig:
    """Return the pip configuration of this machine."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return parse(done.stdout, os.environ)
