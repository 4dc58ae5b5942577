"""Query a registry through the docker command, which has the user's credentials and certificates."""

import ipaddress
import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import docker

from scripts.docker.client import docker_command
from scripts.errors import UserError
from scripts.processes import captured

SECONDS = 60
LAST_PORT = 65535
ABSENT = ("no such manifest", "manifest unknown", "name unknown")
REPOSITORY = re.compile(r"[a-z0-9.-]+(?::(?P<port>[0-9]{1,5}))?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+")
UNREACHABLE = (
    "connection refused",
    "no such host",
    "timeout",
    "no route to host",
    "unreachable",
    "server gave http response",
    "certificate",
    "eof",
)
REFUSED = ("unauthorized", "denied", "no basic auth credentials", "authentication required")


@dataclass(frozen=True)
class Remote:
    """A tag of a registry: digests of its manifest and its config, layers with compressed sizes in bytes."""

    digest: str
    config: str
    layers: tuple[tuple[str, int], ...]

    def holds(self, image: str) -> bool:
        """Whether it is the image with that id, which is either digest, depending on Docker's image store."""
        return image in (self.digest, self.config)


def repository(text: str) -> str:
    """``text`` if it names a repository of a registry; otherwise a `UserError` with the expected form."""
    found = REPOSITORY.fullmatch(text)
    if found is None or not 0 < int(found["port"] or LAST_PORT) <= LAST_PORT:
        raise UserError(f"{text!r}: expected REGISTRY/REPO without a tag, such as ghcr.io/you/rlhf-stacks")
    return text


def host_of(repo: str) -> str:
    """The registry of a repository, as ``docker login`` names it."""
    first = repo.partition("/")[0]
    return first if "." in first or ":" in first or first == "localhost" else "docker.io"


def is_insecure(host: str, config: Mapping[str, Any]) -> bool:
    """Whether Docker connects to ``host`` without TLS, by the ``RegistryConfig`` of its info."""
    known = (config.get("IndexConfigs") or {}).get(host)
    if known is not None:
        return not known.get("Secure", True)
    name = host.rpartition(":")[0] or host
    try:
        address = ipaddress.ip_address("127.0.0.1" if name == "localhost" else name)
    except ValueError:
        return False
    return any(
        address in ipaddress.ip_network(network) for network in config.get("InsecureRegistryCIDRs") or []
    )


def explain_refusal(message: str, repo: str) -> str:
    """A registry's error message in one line, with what to do."""
    host, line = host_of(repo), " ".join(message.split())
    if any(sign in line.lower() for sign in REFUSED):
        return f"{host} refuses access to {repo}: run `docker login {host}`, or request permission ({line})"
    if any(sign in line.lower() for sign in UNREACHABLE):
        return f"the registry {host} cannot be reached: check its name and the network ({line})"
    return f"{host}: {line}"


def parse(text: str) -> Remote:
    """Parse ``docker manifest inspect --verbose``; a `UserError` for a tag of several images."""
    answer = json.loads(text)
    if not isinstance(answer, dict):
        raise UserError("the tag is a list of images for several platforms")
    manifest = answer.get("SchemaV2Manifest") or answer.get("OCIManifest") or {}
    return Remote(
        digest=answer["Descriptor"]["digest"],
        config=manifest["config"]["digest"],
        layers=tuple((layer["digest"], int(layer["size"])) for layer in manifest["layers"]),
    )


def inspect_remote(client: docker.DockerClient, reference: str) -> Remote | None:
    """The image under ``reference``, None without one; a `UserError` if the registry cannot be queried."""
    repo = reference.rpartition(":")[0]
    options = ["--insecure"] if is_insecure(host_of(repo), client.info().get("RegistryConfig") or {}) else []
    try:
        command = [*docker_command(), "manifest", "inspect", "--verbose", *options, reference]
        done = captured(command, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(explain_refusal(f"timeout: no answer within {SECONDS} s", repo)) from None
    if done.returncode == 0:
        try:
            return parse(done.stdout)
        except UserError as problem:
            raise UserError(f"{reference}: {problem}") from None
    if any(sign in done.stderr.lower() for sign in ABSENT):
        return None
    raise UserError(explain_refusal(done.stderr, repo))
