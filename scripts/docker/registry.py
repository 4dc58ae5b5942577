"""What a registry has, asked by the docker command, with the credentials and certificates that it knows."""

import ipaddress
import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import docker

from scripts.docker import bootstrap
from scripts.errors import UserError

SECONDS = 60
ABSENT = ("no such manifest", "manifest unknown", "name unknown")
REPOSITORY = re.compile(r"[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+")
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
    """A tag of a registry: the digest of its manifest, that of the image in it, layers with packed sizes."""

    digest: str
    config: str
    layers: tuple[tuple[str, int], ...]

    def holds(self, image: str) -> bool:
        """Whether it is the image with that id: one digest or the other, as the engine stores images."""
        return image in (self.digest, self.config)


def repository(text: str) -> str:
    """``text`` if it names a repository of a registry; a `UserError` says what is expected."""
    if REPOSITORY.fullmatch(text) is None:
        raise UserError(f"{text!r}: expected REGISTRY/REPO without a tag, such as ghcr.io/you/rlhf-stacks")
    return text


def host_of(repo: str) -> str:
    """The registry of a repository, as ``docker login`` takes it."""
    first = repo.partition("/")[0]
    return first if "." in first or ":" in first or first == "localhost" else "docker.io"


def insecure(host: str, config: Mapping[str, Any]) -> bool:
    """Whether the engine speaks to ``host`` without TLS, by the ``RegistryConfig`` of its info."""
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


def told(message: str, repo: str) -> str:
    """What a registry's refusal comes to, in one line with what to do."""
    host, line = host_of(repo), " ".join(message.split())
    if any(sign in line.lower() for sign in REFUSED):
        return (
            f"{host} does not let you into {repo}: run `docker login {host}`, or ask for the right ({line})"
        )
    if any(sign in line.lower() for sign in UNREACHABLE):
        return f"the registry {host} cannot be reached: check its name and the network ({line})"
    return f"{host}: {line}"


def parse(text: str) -> Remote:
    """What ``docker manifest inspect --verbose`` printed; a `UserError` for a tag that is several images."""
    answer = json.loads(text)
    if not isinstance(answer, dict):
        raise UserError("the tag is a list of images for several platforms")
    manifest = answer.get("SchemaV2Manifest") or answer.get("OCIManifest") or {}
    return Remote(
        digest=answer["Descriptor"]["digest"],
        config=manifest["config"]["digest"],
        layers=tuple((layer["digest"], int(layer["size"])) for layer in manifest["layers"]),
    )


def look(client: docker.DockerClient, reference: str) -> Remote | None:
    """What is under ``reference``, None if nothing is; a `UserError` if the registry cannot be asked."""
    repo = reference.rpartition(":")[0]
    options = ["--insecure"] if insecure(host_of(repo), client.info().get("RegistryConfig") or {}) else []
    try:
        done = subprocess.run(
            [*bootstrap.builder(), "manifest", "inspect", "--verbose", *options, reference],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UserError(told(f"timeout: no answer within {SECONDS} s", repo)) from None
    if done.returncode == 0:
        try:
            return parse(done.stdout)
        except UserError as problem:
            raise UserError(f"{reference}: {problem}") from None
    if any(sign in done.stderr.lower() for sign in ABSENT):
        return None
    raise UserError(told(done.stderr, repo))
