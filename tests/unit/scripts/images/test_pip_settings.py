"""Which settings of the user's pip configuration reach a build, and how."""

import subprocess
from itertools import pairwise
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from scripts.digests import sha256_file
from scripts.images import build, context
from scripts.images.build import build_command, write_secrets
from scripts.images.context import IMAGES, off_index_wheels
from scripts.images.inputs import Inputs
from scripts.locks.index_config import PipConfig

CONFIG = PipConfig(
    index="https://index.example/simple",
    extra=("https://a.example/simple", "https://b.example/simple"),
    links=("https://wheels.example/1", "https://wheels.example/2"),
    trusted=("a.example", "b.example"),
    proxies={"https_proxy": "http://user:password@proxy:1"},
)


def test_a_layer_is_installed_with_the_indexes_and_pages_of_pip(tmp_path: Path) -> None:
    """A wheel is taken from any index, as by pip; by uv's default the first index hides the others."""
    recorder = tmp_path / "uv"
    recorder.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nenv | grep ^UV_\nexit 1\n', encoding="utf-8")
    recorder.chmod(0o755)
    secrets = write_secrets(CONFIG, tmp_path)
    script = (IMAGES / "tools" / "install-layer").read_text(encoding="utf-8")
    script = script.replace("/opt/tools/uv", str(recorder)).replace("/run/secrets/pip", str(secrets["pip"]))
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert {
        "UV_DEFAULT_INDEX=https://index.example/simple",
        "UV_INDEX=https://a.example/simple https://b.example/simple",
        "UV_INDEX_STRATEGY=unsafe-best-match",
        "UV_INSECURE_HOST=a.example b.example",
    } <= set(lines)
    places = [after for word, after in pairwise(lines) if word == "--find-links"]
    assert places == ["https://wheels.example/1", "https://wheels.example/2", "/opt/layer/wheels"]


def test_a_certificate_of_any_encoding_is_a_secret(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes("# Zertifikat für alle\n".encode("latin-1"))
    secrets = write_secrets(PipConfig(certificate=bundle), tmp_path)
    assert secrets["ca"].read_bytes().endswith(bundle.read_bytes())


def test_proxies_are_arguments_of_the_build_without_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value can have a password, which the list of processes would show."""
    monkeypatch.setattr(build, "docker_command", lambda: ["docker"])
    command = build_command(Inputs(tmp_path, "base:1", "builder:1", {}), {}, tmp_path / "id", CONFIG.proxies)
    assert "--build-arg=https_proxy" in command
    assert "password" not in " ".join(command)


def test_a_wheel_that_is_not_on_the_index_is_in_the_context_wherever_it_is_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of the inputs would otherwise depend on the user's pip configuration."""
    wheel = tmp_path / "torch-1+cpu-py3-none-any.whl"
    wheel.write_bytes(b"content")
    fetch = MagicMock(return_value=wheel)
    monkeypatch.setattr(context, "fetch_pristine", fetch)
    digest = sha256_file(wheel)
    text = f"six==1 \\\n    --hash=sha256:{digest}\ntorch==1+cpu \\\n    --hash=sha256:{digest}\n"
    assert off_index_wheels(text, [wheel]) == []
    fetch.assert_not_called()
    assert off_index_wheels(text, []) == [wheel]
    fetch.assert_called_once_with("torch", "1+cpu", [digest])
