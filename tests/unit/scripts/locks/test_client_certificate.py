"""An index that asks for a client's certificate: locks, layers and source wheels reach it."""

import http.server
import os
import ssl
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from scripts.digests import sha256_file
from scripts.errors import UserError
from scripts.images.build import CLIENT, build_command, write_secrets
from scripts.images.context import IMAGES
from scripts.images.inputs import Inputs
from scripts.locks import index_config, resolver
from scripts.locks.index_config import PipConfig, parse

METADATA = "Metadata-Version: 2.1\nName: thing\nVersion: 1\n"
WHEEL_TAGS = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@dataclass(frozen=True)
class Index:
    """An index with the package ``thing``: its hashed requirement, and the configuration that reaches it."""

    requirement: str
    config: PipConfig


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    folder = tmp_path_factory.mktemp("index")
    wheel = _wheel(folder / "simple" / "thing")
    (wheel.parent / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>', encoding="utf-8")
    authority = _authority(folder)
    server_pem, client_pem = (_signed(authority, name) for name in ("server", "client"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_pem)
    context.load_verify_locations(authority)
    context.verify_mode = ssl.CERT_REQUIRED
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Index(
            f"thing==1 --hash=sha256:{sha256_file(wheel)}\n",
            PipConfig(
                index=f"https://127.0.0.1:{server.server_port}/simple",
                certificate=authority,
                client=client_pem,
                proxies={"no_proxy": "127.0.0.1"},
            ),
        )
        server.shutdown()
        thread.join()


def _wheel(folder: Path) -> Path:
    folder.mkdir(parents=True)
    path = folder / "thing-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thing.py", "")
        archive.writestr("thing-1.dist-info/METADATA", METADATA)
        archive.writestr("thing-1.dist-info/WHEEL", WHEEL_TAGS)
        archive.writestr("thing-1.dist-info/RECORD", "")
    return path


def _authority(folder: Path) -> Path:
    """Return the certificate of an authority, with its key next to it."""
    path = folder / "authority.crt"
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=authority"]
    _openssl(*made, "-keyout", folder / "authority.key", "-out", path)
    return path


def _signed(authority: Path, name: str) -> Path:
    """Return a file with a key and its certificate for 127.0.0.1, signed by ``authority``."""
    path, request, extensions = (authority.with_name(f"{name}.{end}") for end in ("pem", "csr", "ext"))
    extensions.write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n", encoding="utf-8")
    made = ["req", "-new", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"]
    _openssl(*made, "-keyout", path, "-out", request)
    signer: list[str | Path] = ["-CA", authority, "-CAkey", authority.with_suffix(".key"), "-CAcreateserial"]
    certificate = _openssl("x509", "-req", "-in", request, "-days", "2", "-extfile", extensions, *signer)
    path.write_bytes(path.read_bytes() + certificate)
    return path


def _openssl(*arguments: str | Path) -> bytes:
    return subprocess.run(["openssl", *arguments], capture_output=True, check=True).stdout


def test_a_lock_finds_a_package(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.setattr(index_config, "load", lambda: replace(index.config, client=None))
    with pytest.raises(UserError, match="thing"):
        resolver.finds(index.requirement, "3.11", "x86_64-manylinux_2_36")
    monkeypatch.setattr(index_config, "load", lambda: index.config)
    assert resolver.finds(index.requirement, "3.11", "x86_64-manylinux_2_36")


@pytest.mark.parametrize("has_client", [True, False])
def test_pip_in_a_build_downloads_it(index: Index, has_client: bool, tmp_path: Path) -> None:
    secrets = write_secrets(index.config if has_client else replace(index.config, client=None), tmp_path)
    settings = tmp_path / "pip.conf"
    settings.write_text(
        secrets["pip"].read_text().replace(CLIENT, str(secrets.get("client"))), encoding="utf-8"
    )
    wanted = tmp_path / "wanted.txt"
    wanted.write_text(index.requirement, encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--retries=0"),
            *("--require-hashes", "-r", str(wanted), "--dest", str(tmp_path)),
        ],
        env={
            "PATH": os.environ["PATH"],
            "PIP_CONFIG_FILE": str(settings),
            "PIP_CERT": str(secrets["ca"]),
            "no_proxy": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert (tmp_path / "thing-1-py3-none-any.whl").exists() == has_client, done.stderr


def test_uv_in_a_build_gets_it(index: Index, tmp_path: Path) -> None:
    secrets = write_secrets(index.config, tmp_path)
    recorder = tmp_path / "uv"
    recorder.write_text("#!/bin/sh\nenv | grep ^SSL_\nexit 1\n", encoding="utf-8")
    recorder.chmod(0o755)
    script = (IMAGES / "tools" / "install-layer").read_text(encoding="utf-8")
    script = script.replace("/opt/tools/uv", str(recorder)).replace("/run/secrets/", f"{tmp_path}/")
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert f"SSL_CLIENT_CERT={secrets['client']}" in done.stdout.splitlines()


def test_every_step_that_installs_gets_the_secret(index: Index, tmp_path: Path) -> None:
    secrets = write_secrets(index.config, tmp_path)
    command = build_command(Inputs(tmp_path, "base:1", "builder:1", {}), secrets, tmp_path / "id")
    assert f"--secret=id=client,src={tmp_path}/client" in command
    for dockerfile in (IMAGES / "Dockerfile", IMAGES / "examples" / "Dockerfile"):
        text = dockerfile.read_text(encoding="utf-8")
        assert text.count(f"id=client,target={CLIENT},") == text.count("id=pip,target=") > 0


def test_a_certificate_that_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = tmp_path / "me.pem"
    listing = f"global.client-cert='{pem}'\n"
    assert parse(listing, {}).unsupported == (f"client-cert {pem}: not a file",)
    pem.write_text("key", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse("global.client-cert='~/me.pem'\n", {}).client == pem
    assert parse(listing, {}).unsupported == ()
    assert parse(listing, {}).client == pem
