"""Execute cases on a CPU: in the root of a toolchain, with the emulator of a checkout of tinygrad."""

import json
import os
import subprocess
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from scripts.digests import sha256
from scripts.docker.client import docker_command
from scripts.errors import UserError
from scripts.hip import cases
from scripts.hip.cases import Case, Work
from scripts.hip.inspection import Built
from scripts.paths import ROOT
from scripts.release import kernels
from scripts.testing.cluster import LABEL, owner_label

CHECKOUT = "RLHF_STACK_CDNA_EMULATOR"
TESTED = "a9069c177a9da9cca18593edf55acd2e6073cca6"
EMULATOR = Path("test", "mockgpu", "amd", "emu.py")
USED = ("def _decode_at(", "def _init_wave(", "ENDPGM_PC", "_BARRIER_OPS", "irc.")
SCRIPT = ROOT / "scripts" / "hip" / "emulate.py"
GET = f"clone tinygrad/tinygrad at {TESTED[:12]}"
NOT_SET = f"{CHECKOUT} is not set: {GET} and name its folder"
MEMORY = "8g"
RUN = "CC=$(ls /usr/bin/clang-[0-9]*) exec nice -n 19 python3 /emulate.py"


@dataclass(frozen=True)
class Outcome:
    """What a case gave: the worst error if it was executed, else why not."""

    seconds: float
    error: float | None
    reason: str = ""


def is_named() -> bool:
    """Return whether the user names an emulator."""
    return bool(os.environ.get(CHECKOUT))


def checkout() -> Path:
    """Return the folder of the emulator; `UserError` with what to get if there is none."""
    named = os.environ.get(CHECKOUT, "")
    if not named:
        raise UserError(NOT_SET)
    source = Path(named).expanduser() / EMULATOR
    if not source.is_file():
        raise UserError(f"{CHECKOUT}: {source} is missing: {GET}")
    text = source.read_text(encoding="utf-8", errors="replace")
    if missing := [name for name in USED if name not in text]:
        raise UserError(f"{CHECKOUT}: {source} has no {missing[0]!r}: use tinygrad at {TESTED[:12]}")
    return Path(named).expanduser().resolve()


class Executor:
    """Runs cases for one architecture; a container keeps what the emulator compiled for the next case."""

    def __init__(self, root: str, folder: Path, emulator: Path, wheels: Mapping[Built, Path]) -> None:
        """Prepare for the image ``root`` of a toolchain; ``folder`` keeps code objects and compiled code."""
        self.root, self.folder, self.emulator = root, folder, emulator
        folder.mkdir(parents=True, exist_ok=True)
        self.codes = {package: list(_code_objects(wheel)) for package, wheel in wheels.items()}

    def run(self, architecture: str, chosen: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
        """Yield the outcome of each case. A case that ends the emulator does not end the others."""
        waiting = [(case, case.make()) for case in chosen]
        while waiting:
            jobs = self.folder / "jobs"
            lines = (json.dumps(self._job(architecture, case, work)) for case, work in waiting)
            jobs.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            with (self.folder / "log").open("w+", encoding="utf-8") as errors:
                with jobs.open(encoding="utf-8") as given, self._started(given, errors) as process:
                    for line in process.stdout or ():
                        (case, work), *waiting = waiting
                        result = json.loads(line)
                        if result["id"] != case.id:
                            raise UserError(f"the emulator answered {result['id']} instead of {case.id}")
                        yield case, _outcome(work, result)
                errors.seek(0)
                ended = (errors.read().strip().splitlines() or ["no message"])[-1]
            if waiting:
                case, _ = waiting.pop(0)
                yield case, Outcome(0, None, f"the emulator ended with {process.returncode}: {ended}")

    def scratch(self, architecture: str, case: Case) -> int:
        """Return the most scratch memory, in bytes, that the kernels of a case use."""
        file, most = None, 0
        for launch in case.make().launches:
            kernel, file = self._kernel(architecture, case.package, launch.kernel, file)
            most = max(most, kernel[".private_segment_fixed_size"])
        return most

    def _job(self, architecture: str, case: Case, work: Work) -> dict[str, Any]:
        """Return the job of `emulate` for a case; `LookupError` if its kernel was not compiled."""
        launches = []
        file = None
        for launch in work.launches:
            kernel, file = self._kernel(architecture, case.package, launch.kernel, file)
            launches.append(
                {
                    "kernel": kernel[".name"],
                    "grid": launch.grid,
                    "block": (launch.block, 1, 1),
                    "lds": launch.lds,
                    "values": launch.values,
                    "arguments": [
                        (one[".value_kind"], one[".offset"], one[".size"]) for one in kernel[".args"]
                    ],
                }
            )
        return {
            "id": case.id,
            "code": f"/code/{file}",
            "buffers": [content.hex() for content in work.buffers],
            "pointers": work.pointers,
            "results": sorted(work.expected),
            "launches": launches,
        }

    def _kernel(
        self, architecture: str, package: Built, pattern: str, same: str | None
    ) -> tuple[dict[str, Any], str]:
        """Return metadata and file of a kernel, in the code object ``same`` if one is given."""
        found = {}
        for own, content, metadata in self.codes[package]:
            file = f"{sha256(content)[:16]}.co"
            for kernel in metadata.get("amdhsa.kernels", ()):
                if own == architecture and same in (None, file):
                    found[kernel[".name"]] = (kernel, file, content)
        kernel, file, content = found[cases.find(list(found), pattern)]
        (self.folder / file).write_bytes(content)
        return kernel, file

    @contextmanager
    def _started(self, given: IO[str], errors: IO[str]) -> Iterator[subprocess.Popen[str]]:
        """Start the emulator's container, which ends with the context, also if that is interrupted."""
        mounts = {self.folder: "/code", SCRIPT: "/emulate.py:ro", self.emulator: "/emulator:ro"}
        (self.folder / "cache").mkdir(exist_ok=True)
        settings = ("PYTHONPATH=/emulator", "XDG_CACHE_HOME=/code/cache", "PYTHONDONTWRITEBYTECODE=1")
        command = [
            *docker_command(),
            # As process 1, Python would ignore the signal that ends it: hence --init.
            *("run", "--rm", "--init", "--interactive", "--network=none", f"--memory={MEMORY}"),
            f"--label={LABEL}={owner_label()}",
            *(f"--volume={path}:{inside}" for path, inside in mounts.items()),
            *(f"--env={setting}" for setting in settings),
            *(self.root, "sh", "-c", RUN),
        ]
        with subprocess.Popen(
            command, stdin=given, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            try:
                yield process
            except BaseException:
                process.terminate()  # `docker run` passes it on
                raise


def _outcome(work: Work, result: Mapping[str, Any]) -> Outcome:
    if "error" in result:
        return Outcome(result["seconds"], None, result["error"])
    found = zip(sorted(work.expected), map(bytes.fromhex, result["buffers"]), strict=True)
    worst = max(cases.worst_error(work.expected[index], content) for index, content in found)
    return Outcome(result["seconds"], worst)


def _code_objects(wheel: Path) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                yield from kernels.code_objects(archive.read(name))
