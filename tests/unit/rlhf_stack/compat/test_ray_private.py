"""Ray's private API: version differences, and the rule that one module uses it."""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import rlhf_stack
from rlhf_stack.compat import ray_private

PRIVATE = ("ray._", "ray.experimental")
PACKAGE = Path(rlhf_stack.__file__).parent


def uses_private_api(file: Path) -> bool:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        if any(name.startswith(PRIVATE) for name in names):
            return True
    return False


def test_only_ray_private_uses_the_private_api() -> None:
    found = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if uses_private_api(file)}
    assert found == {"compat/ray_private.py"}


def test_free_resources_are_found_in_old_and_new_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    private = MagicMock()
    monkeypatch.setitem(sys.modules, "ray._private", private)
    private.state.available_resources_per_node.return_value = {"a": {"GPU": 1.0}}
    assert ray_private.available_resources_per_node() == {"a": {"GPU": 1.0}}
    del private.state.available_resources_per_node  # as in Ray 2.9.3
    private.state.state._available_resources_per_node.return_value = {"b": {"GPU": 2.0}}
    assert ray_private.available_resources_per_node() == {"b": {"GPU": 2.0}}


def test_the_end_of_a_dead_node_is_known_since_ray_2_55(monkeypatch: pytest.MonkeyPatch) -> None:
    client = MagicMock()
    monkeypatch.setattr(ray_private, "gcs_client", client)
    table = client.return_value.get_all_node_info
    table.return_value = {b"\x01": SimpleNamespace(end_time_ms=1500), b"\x02": SimpleNamespace(end_time_ms=0)}
    assert ray_private.node_end_times("head:6379", 5.0) == {"01": 1.5}
    table.return_value = {b"\x01": {"state": 1}}  # as in Ray 2.9.3 and 2.12.0
    assert ray_private.node_end_times("head:6379", 5.0) == {}


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install an empty package "ray" in ``folder``, and return its path."""
    (folder / "ray").mkdir()
    (folder / "ray" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    return folder / "ray"


@pytest.mark.parametrize("release_has_tokens", [False, True])
def test_token_support_follows_the_installed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release_has_tokens: bool
) -> None:
    package = install(tmp_path, monkeypatch)
    (package / "_private" / ("authentication" if release_has_tokens else "other")).mkdir(parents=True)
    assert ray_private.has_token_authentication() == release_has_tokens


@pytest.mark.parametrize(("source", "known"), [(None, False), ("", False), ("def is_ipv6(host):\n", True)])
def test_ipv6_support_follows_the_installed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, known: bool
) -> None:
    package = install(tmp_path, monkeypatch)
    if source is not None:
        (package / "_common").mkdir()
        (package / "_common" / "network_utils.py").write_text(source)
    assert ray_private.has_ipv6() == known
