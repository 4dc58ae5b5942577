"""A wheel is compiled once for what it is built from, and again for anything else."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.images.context import IMAGES

PYTHON = """#!/bin/sh
if [ "$5" = download ]; then
    while [ "$1" != --dest ]; do shift; done
    mkdir -p "$2" {folder}/deepspeed-1
    tar -czf "$2/deepspeed-1.tar.gz" -C {folder} deepspeed-1
    exit
fi
for last; do :; done
echo "compiled $last" >>{folder}/log
[ ! -e {folder}/broken ] || exit 1
while [ "$1" != --wheel-dir ]; do shift; done
echo "flags $A" >"$2/deepspeed-1-py3-none-any.whl"
"""


class Builder:
    """The stage that builds from source, with a recording fake of pip."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        script = (IMAGES / "tools" / "build-source").read_text(encoding="utf-8")
        places = {
            "/tmp/s": "s",
            "/opt/layer": "layer",
            "/var/cache/wheels": "kept",
            "/usr/bin/python3": "python",
        }
        for place, name in places.items():
            script = script.replace(place, str(folder / name))
        files = {
            "build-source": script,
            "python": PYTHON.format(folder=folder),
            "layer/requirements.txt": "deepspeed==1 --hash=sha256:1\n",
            "layer/sources/env": "A=1\n",
            "layer/sources/built-against.txt": "torch==1 --hash=sha256:2\n",
        }
        (folder / "layer" / "sources").mkdir(parents=True)
        (folder / "kept").mkdir()
        for name, text in files.items():
            self.write(name, text)
        (folder / "python").chmod(0o755)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")

    def run(self, wheels: str, base: str = "builder:1") -> int:
        """Build into a new folder and return the exit code."""
        command = ["sh", str(self.folder / "build-source"), str(self.folder / wheels)]
        environment = {**os.environ, "BUILDER_BASE": base}
        return subprocess.run(command, env=environment, capture_output=True, check=False).returncode

    @property
    def compiled(self) -> int:
        """How often it compiled."""
        log = self.folder / "log"
        return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    return Builder(tmp_path)


def test_the_second_build_copies_the_wheels_of_the_first(builder: Builder) -> None:
    assert (builder.run("first"), builder.run("second")) == (0, 0)
    assert builder.compiled == 1
    [wheel] = (builder.folder / "second").iterdir()
    assert (wheel.name, wheel.read_text()) == ("deepspeed-1-py3-none-any.whl", "flags 1\n")


def test_the_folder_of_a_build_has_the_same_name_every_time(builder: Builder) -> None:
    """What compilers bring into a wheel names it."""
    assert builder.run("first") == 0
    builder.write("layer/sources/env", "A=2\n")
    assert builder.run("second") == 0
    folder = builder.folder / "sources" / "deepspeed-1"
    assert (builder.folder / "log").read_text().splitlines() == [f"compiled {folder}"] * 2


def test_a_source_distribution_is_edited_before_it_is_built(builder: Builder) -> None:
    builder.write("layer/sources/deepspeed.edit", '#!/bin/sh\necho edited >"$1/edited"\n')
    (builder.folder / "layer" / "sources" / "deepspeed.edit").chmod(0o755)
    assert builder.run("first") == 0
    assert (builder.folder / "sources" / "deepspeed-1" / "edited").exists()


def test_an_edit_that_fails_ends_the_build(builder: Builder) -> None:
    builder.write("layer/sources/deepspeed.edit", "#!/bin/sh\nexit 1\n")
    (builder.folder / "layer" / "sources" / "deepspeed.edit").chmod(0o755)
    assert builder.run("first") != 0
    assert builder.compiled == 0


CHANGES: dict[str, Callable[[Builder], object]] = {
    "source distribution": lambda it: it.write("layer/requirements.txt", "deepspeed==1 --hash=sha256:9\n"),
    "flags": lambda it: it.write("layer/sources/env", "A=2\n"),
    "torch": lambda it: it.write("layer/sources/built-against.txt", "torch==1 --hash=sha256:9\n"),
    "an edit of another package": lambda it: it.write("layer/sources/vllm.edit", ""),
    "a file of a recipe": lambda it: it.write("layer/sources/setup.py", ""),
    "build-source": lambda it: it.write(
        "build-source", f"{(it.folder / 'build-source').read_text()}\n# another step\n"
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_anything_else_is_compiled(change: Callable[[Builder], object], builder: Builder) -> None:
    builder.run("first")
    change(builder)
    assert builder.run("second") == 0
    assert builder.compiled == 2


def test_another_builder_image_compiles(builder: Builder) -> None:
    builder.run("first")
    builder.run("second", base="builder:2")
    assert builder.compiled == 2


def test_a_failed_build_keeps_nothing(builder: Builder) -> None:
    builder.write("broken", "")
    assert builder.run("first") != 0
    assert list((builder.folder / "kept").iterdir()) == []
    (builder.folder / "broken").unlink()
    assert builder.run("second") == 0
    assert builder.compiled == 2
