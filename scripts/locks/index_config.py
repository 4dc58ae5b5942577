"""The user's pip configuration: indexes, wheels, certificate, proxy. Builds receive it as secrets."""

import ast
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.errors import UserError
from scripts.processes import captured

CERTIFICATES = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE")
SYSTEM_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
# Docker passes build arguments of these names, in either case, to every step, and records them in no image.
TRUE = ("1", "true", "yes", "on", "y", "t")  # as pip reads a switch
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")


@dataclass(frozen=True)
class PipConfig:
    """URLs of the indexes, places of wheels, the CA bundle, and the file of a client's certificate and key.

    ``find_links`` are local folders, ``links`` URLs of pages. ``proxies`` are environment variables. A line
    of ``unsupported`` names a setting that does not reach a build.
    """

    index: str | None = None
    extra: tuple[str, ...] = ()
    find_links: tuple[Path, ...] = ()
    links: tuple[str, ...] = ()
    trusted: tuple[str, ...] = ()
    certificate: Path | None = None
    client: Path | None = None
    proxies: Mapping[str, str] = field(default_factory=dict)
    unsupported: tuple[str, ...] = ()

    def portable(self) -> str:
        """Return a pip.conf for any machine: with addresses, without paths and without the proxy."""
        values = {
            "index-url": self.index or "",
            "extra-index-url": " ".join(self.extra),
            "find-links": " ".join(self.links),
            "trusted-host": " ".join(self.trusted),
        }
        return "".join(["[global]\n", *(f"{name} = {value}\n" for name, value in values.items() if value)])

    def environment(self) -> dict[str, str]:
        """Return the environment for uv and Docker: the caller's, with the proxy of pip's configuration."""
        others = {name: value for name, value in os.environ.items() if name.lower() not in self.proxies}
        return {**others, **self.proxies}


def parse(listing: str, environment: Mapping[str, str]) -> PipConfig:
    """Parse the output of ``pip config list``, in which variables are ``:env:`` entries."""
    values = _values(listing)
    links = _words(values.get("find-links", ""))
    folders = [_path(word.removeprefix("file://")) for word in links if not _is_remote(word)]
    extra = _words(values.get("extra-index-url", ""))
    named = [values.get("cert", ""), *(environment.get(name, "") for name in CERTIFICATES)]
    certificates = [*(_path(name) for name in named if name), SYSTEM_BUNDLE]
    files = {name: _path(values[name]) for name in ("cert", "client-cert") if values.get(name)}
    missing = {name: path for name, path in files.items() if not path.is_file()}
    client = files.get("client-cert")
    return PipConfig(
        index=values.get("index-url") or None,
        extra=tuple(filter(_is_remote, extra)),
        find_links=tuple(path for path in folders if path.is_dir()),
        links=tuple(filter(_is_remote, links)),
        trusted=tuple(_words(values.get("trusted-host", ""))),
        certificate=next((path for path in certificates if path.is_file()), None),
        client=None if "client-cert" in missing else client,
        proxies=_proxies(values.get("proxy"), environment),
        unsupported=(
            *(f"extra-index-url {word}: not a URL of http" for word in extra if not _is_remote(word)),
            *(f"find-links {path}: not a folder" for path in folders if not path.is_dir()),
            *(f"{name} {path}: not a file" for name, path in missing.items()),
            *(["no-index: builds use the index"] if values.get("no-index", "").lower() in TRUE else []),
        ),
    )


def _values(listing: str) -> dict[str, str]:
    """Return the settings by name; as in pip, those of ``install`` and variables have precedence."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in found:
            found[section][name] = str(ast.literal_eval(value))  # which pip prints as Python does
    return {name: value for section in found.values() for name, value in section.items()}


def _path(name: str) -> Path:
    return Path(name).expanduser().absolute()


def _is_remote(word: str) -> bool:
    return word.startswith(("http://", "https://"))


def _proxies(proxy: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return proxy variables in lower case; as in pip, ``proxy`` of its configuration has precedence."""
    found = {name.lower(): value for name, value in environment.items() if name.lower() in PROXIES and value}
    return {**found, **dict.fromkeys(("http_proxy", "https_proxy"), proxy)} if proxy else found


def _words(value: str) -> Sequence[str]:
    return value.split()


def load() -> PipConfig:
    """Return the pip configuration of this machine."""
    listed = captured([sys.executable, "-m", "pip", "config", "list"])
    if listed.returncode:
        raise UserError(f"pip's configuration cannot be read: {' '.join(listed.stderr.split())}")
    return parse(listed.stdout, os.environ)
