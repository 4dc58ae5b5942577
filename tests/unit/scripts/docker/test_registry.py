"""Repositories, TLS and refusals of registries, without a registry."""

from typing import Any

import pytest

from scripts.docker import registry
from scripts.errors import UserError


@pytest.mark.parametrize(
    "text",
    [
        *("rlhf-stacks", "ghcr.io/you/x:tag", "GHCR.io/you/x", "https://h/x", "h/", ""),
        *("localhost:99999/x", "localhost:65536/x", "localhost:0/x"),
    ],
)
def test_a_text_that_names_no_repository_is_an_error(text: str) -> None:
    with pytest.raises(UserError, match="expected REGISTRY/REPO without a tag"):
        registry.repository(text)


@pytest.mark.parametrize(
    ("repo", "host"),
    [
        ("ghcr.io/you/rlhf-stacks", "ghcr.io"),
        ("127.0.0.1:5000/rlhf-stacks", "127.0.0.1:5000"),
        ("localhost/rlhf-stacks", "localhost"),
        ("localhost:65535/x", "localhost:65535"),
        ("you/rlhf-stacks", "docker.io"),
    ],
)
def test_the_registry_of_a_repository(repo: str, host: str) -> None:
    assert registry.host_of(registry.repository(repo)) == host


@pytest.mark.parametrize(
    ("host", "plain"),
    [
        ("127.0.0.1:5000", True),
        ("localhost:5000", True),
        ("10.1.1.1:5000", False),
        ("known.example", True),
        ("ghcr.io", False),
    ],
)
def test_tls_is_omitted_only_where_docker_omits_it(host: str, plain: bool) -> None:
    """A mistyped host must not receive a password in clear text."""
    config: dict[str, Any] = {
        "InsecureRegistryCIDRs": ["127.0.0.0/8"],
        "IndexConfigs": {"known.example": {"Secure": False}, "docker.io": {"Secure": True}},
    }
    assert registry.is_insecure(host, config) is plain


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("unauthorized: authentication\nrequired", "run `docker login h.example`"),
        ("denied: requested access to the resource is denied", "run `docker login h.example`"),
        ("dial tcp: lookup h.example: no such host", "the registry h.example cannot be reached"),
        ("dial tcp 1.2.3.4:443: connect: connection refused", "the registry h.example cannot be reached"),
        ("manifest invalid", "h.example: manifest invalid"),
    ],
)
def test_a_refusal_is_explained_in_one_line(message: str, expected: str) -> None:
    line = registry.explain_refusal(message, "h.example/x")
    assert expected in line
    assert "\n" not in line


def test_a_tag_for_several_platforms_is_an_error() -> None:
    with pytest.raises(UserError, match="several platforms"):
        registry.parse("[]")
