"""A registry on this machine: Debian's docker-registry as a separate process, on a loopback port.

Docker connects to loopback addresses without TLS. The package is unpacked, not installed: its service would
listen on all addresses.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.docker import bootstrap
from scripts.errors import UserError
from scripts.paths import ROOT

PACKAGE = "docker-registry"
UNPACKED = ROOT / "build" / PACKAGE
SECONDS = 30.0
LISTENS = re.compile(r'listening on (127\.0\.0\.1:\d+)"')
SERVED = re.compile(r'"GET /v2/\S+/blobs/(sha256:[0-9a-f]{64}) HTTP/1\.1" 200 (\d+) ')


@dataclass(frozen=True)
class Registry:
    """A running registry: its address, and its log file with every request."""

    host: str
    log: Path

    def served(self) -> dict[str, int]:
        """Return the blobs that were fetched so far, with the bytes sent."""
        return {digest: int(size) for digest, size in SERVED.findall(self.log.read_text(encoding="utf-8"))}


def program() -> str:
    """Return the registry's program: the installed one, or that of the package, which is fetched once."""
    if found := shutil.which(PACKAGE):
        return found
    path = UNPACKED / "usr" / "bin" / PACKAGE
    if not path.exists():
        bootstrap.unpack(PACKAGE, UNPACKED)
    return str(path)


@contextmanager
def running(folder: Path, htpasswd: str | None = None) -> Iterator[Registry]:
    """Run a registry that keeps everything in ``folder``.

    With ``htpasswd``, the text of such a file, it requires a login.
    """
    folder.mkdir(parents=True, exist_ok=True)
    configuration: dict[str, object] = {
        "version": 0.1,
        "log": {"level": "info", "formatter": "json", "accesslog": {"disabled": False}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": "127.0.0.1:0"},
    }
    if htpasswd is not None:
        (folder / "htpasswd").write_text(htpasswd, encoding="utf-8")
        configuration["auth"] = {"htpasswd": {"realm": "tests", "path": str(folder / "htpasswd")}}
    file, log = folder / "config.yml", folder / "log"
    file.write_text(json.dumps(configuration), encoding="utf-8")  # JSON is YAML
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [program(), "serve", str(file)], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        yield Registry(_address(process, log), log)
    finally:
        process.terminate()
        process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address in the registry's log; `UserError` if it does not start."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if address := LISTENS.search(log.read_text(encoding="utf-8")):
            return address[1]
        time.sleep(0.05)
    lines = log.read_text(encoding="utf-8").splitlines() or ["its log is empty"]
    raise UserError(f"{PACKAGE} did not start: {lines[-1]}")
