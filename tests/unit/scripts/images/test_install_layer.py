"""What the installation of a layer compiles to bytecode."""

import os
import subprocess
import sys
from pathlib import Path

from scripts.images.context import IMAGES

# Installs a module that is newer than the second in which the layer was started.
UV = "#!/bin/sh\nuntil find {new} -newerct @{started} 2>&1 | grep -qx {new}; do echo >{new}; done\n"


def test_a_layer_compiles_its_own_modules_and_not_those_of_the_layers_below(tmp_path: Path) -> None:
    """The image would otherwise contain the bytecode of each layer once more in every layer above."""
    packages = tmp_path / "venv/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    (below := packages / "below.py").touch()
    second = int(below.stat().st_ctime) + 1
    commands = {
        "uv": UV.format(new=packages / "own.py", started=second),
        "date": f"#!/bin/sh\necho {second + 1}\n",  # the layer counts from a second before
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "trim.txt").touch()
    script = (IMAGES / "tools" / "install-layer").read_text(encoding="utf-8")
    places = {
        "/opt/venv/bin/python": sys.executable,
        "/opt/tools/trim.py": str(IMAGES / "tools" / "trim.py"),
        "/opt/tools": str(tmp_path),
        "/opt/venv": str(tmp_path / "venv"),
        "/opt/layer": str(tmp_path),
    }
    for place, here in places.items():
        script = script.replace(place, here)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["sh", "-c", script], env={**os.environ, "PATH": path}, check=True)
    compiled = {file.name.partition(".")[0] for file in packages.rglob("*.pyc")}
    assert compiled == {"own"}
