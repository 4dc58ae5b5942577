"""Lay out the build context of a cell from the matrix, the lock, the patched wheels and ``images/``."""

import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from importlib.metadata import distribution
from pathlib import Path

import msgspec

from scripts.images import rootfs, wheels
from scripts.images.pins import layers_with, local_wheels, source_pin
from scripts.locks import lockfile, targets
from scripts.locks.index_config import PipConfig
from scripts.matrix.load import Cell, Setting
from scripts.matrix.model import Layer
from scripts.patches.pristine import fetch_pristine, locked_hashes
from scripts.patches.series import series_of
from scripts.paths import ROOT

IMAGES = ROOT / "images"
CONTEXTS = ROOT / "build" / "context"
PATCHED = ROOT / "build" / "wheels" / "patched"
FOLDER_MODE, FILE_MODE = 0o755, 0o644
ACCELERATOR = "RLHF_STACK_ACCELERATOR"  # read by rlhf_stack.config.env_vars


def lay_out(cell: Cell, config: PipConfig, contexts: Path = CONTEXTS) -> Path:
    """Write the build context of a cell to a folder of ``contexts`` and return the folder."""
    folder = contexts / cell.id
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(IMAGES / "rootfs", folder / "rootfs")
    place_tools(folder)
    lock_file = lockfile.path(cell)
    targets.require(cell)
    patched = wheels.make_wheels(series_of(cell), lock_file, PATCHED)
    lock_text = lock_file.read_text(encoding="utf-8")
    texts = layers_with(patched, lockfile.layers(lock_text, cell))
    for layer in cell.layers:
        (folder / "wheels" / layer.name).mkdir(parents=True)
        found = local_wheels(texts[layer.name], [*config.find_links, PATCHED])
        for wheel in (*found, *off_index_wheels(texts[layer.name], found)):
            place(wheel, folder / "wheels" / layer.name / wheel.name)
        write(folder / "trim" / f"{layer.name}.txt", "".join(f"{t.action} {t.path}\n" for t in layer.trim))
        _place_side_by_side(cell, layer, folder / "side_by_side" / layer.name)
        sources = folder / "sources" / layer.name
        place_sources(cell, layer, lock_text, sources)
        against = [texts[name] for name in built_against(cell, layer, texts)]
        write(sources / "built-against.txt", "".join(against))
    for wheel in local_wheels(texts["stack"], [PATCHED]):
        place(wheel, folder / "wheels" / "stack" / wheel.name)
    write(folder / "trim" / "stack.txt", "")
    (folder / "side_by_side" / "stack").mkdir(parents=True)
    for name, text in texts.items():
        write(folder / "requirements" / f"{name}.txt", text)
    pins = [block.split()[0] for text in texts.values() for block in lockfile.blocks(text)]
    write(folder / "etc" / "constraints.txt", "".join(f"{pin}\n" for pin in pins))
    shutil.copy(lock_file, folder / "etc" / "lock.txt")
    debs = rootfs.roots(cell)[0].locked
    write(folder / "etc" / "debian.txt", "".join(f"{deb.line}\n" for deb in debs))
    cell_json = msgspec.json.format(msgspec.json.encode(cell), indent=2).decode()
    write(folder / "etc" / "cell.json", cell_json + "\n")
    write_environment(cell, folder / "etc")
    write(folder / "Dockerfile", dockerfile(cell, built_against(cell, cell.layers[-1], texts)[-1]))
    normalise_modes(folder)
    return folder


def off_index_wheels(requirements: str, found: Iterable[Path]) -> list[Path]:
    """Download the wheels with a local version, except patched and ``found`` ones, and return their paths.

    They are part of the context wherever they come from: its digest does not depend on that.
    """
    names = {lockfile.normal(wheel.name.split("-")[0]) for wheel in found}
    return [
        fetch_pristine(entry.name, entry.version, locked_hashes(entry.name, entry.version, requirements))
        for entry in lockfile.parse(requirements)
        if "+" in entry.version and entry.name not in names
    ]


def normalise_modes(folder: Path) -> None:
    """Set the modes of everything below ``folder`` to 0755 or 0644, whatever the umask of its creator was.

    COPY gives files and folders of the image these modes: under umask 002 its user could write to /usr.
    """
    folder.chmod(FOLDER_MODE)
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(_mode(path))


def _mode(path: Path) -> int:
    executable = path.is_dir() or path.stat().st_mode & stat.S_IXUSR
    return FOLDER_MODE if executable else FILE_MODE


def built_against(cell: Cell, layer: Layer, texts: Mapping[str, str]) -> tuple[str, ...]:
    """Return the layers, bottom first, that the source builds of ``layer`` need; ``texts`` are their pins."""
    builds = [build for build in cell.build_from_source if build.package in layer.packages]
    needs = {lockfile.distribution(cell, name) for build in builds for name in build.needs}
    names = [one.name for one in cell.layers]
    found = [name for name in names if needs & {entry.name for entry in lockfile.parse(texts[name])}]
    return tuple(names[: names.index(found[-1]) + 1]) if found else tuple(names[:1])


def dockerfile(cell: Cell, openrlhf_built_on: str) -> str:
    """Return images/Dockerfile with the env defaults of the cell appended, and an argument set to a layer."""
    lines = [
        f"# {setting.reason} ({setting.source})\nENV {setting.name}={quoted(setting.value)}"
        for setting in cell.env
    ]
    text = (IMAGES / "Dockerfile").read_text(encoding="utf-8").rstrip()
    text = re.sub("(?m)^(ARG OPENRLHF_BUILT_ON=).*$", rf"\1{openrlhf_built_on}", text)
    return "\n".join([text, f"ENV {ACCELERATOR}={cell.accelerator.kind}", *lines]) + "\n"


def quoted(value: str) -> str:
    """Quote a value for ENV and LABEL of a Dockerfile, without expansion."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


def write_environment(cell: Cell, folder: Path) -> None:
    """Write the env defaults and profiles that the entrypoint and login shells read."""
    header = f"# the accelerator of this image\n{ACCELERATOR}={cell.accelerator.kind}\n"
    write(folder / "env", header + _settings_file(cell.env))
    (folder / "profiles").mkdir(parents=True)
    for profile in cell.accelerator.profiles:
        write(folder / "profiles" / profile.name, _settings_file(profile.env))


def place(source: Path, target: Path) -> None:
    """Hard-link a file into the context, because wheels are large; copy it if the link cannot be used.

    That is across file systems, and where `normalise_modes` would change the mode of the user's own file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        if stat.S_IMODE(source.stat().st_mode) != _mode(source):
            raise OSError("another mode")
        target.hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)


def write(target: Path, text: str) -> None:
    """Write a file of the context."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def _settings_file(settings: Iterable[Setting]) -> str:
    """Format settings for images/rootfs/usr/local/lib/rlhf-stack/environment, one line each."""
    return "".join(f"# {' '.join(item.reason.split())}\n{item.name}={item.value}\n" for item in settings)


def place_tools(folder: Path) -> None:
    """Place the commands of the build, and the uv of this environment, into a build context."""
    shutil.copytree(IMAGES / "tools", folder / "tools")
    place(_uv(), folder / "tools" / "uv")


def _uv() -> Path:
    """Return the uv binary of this environment, which the build uses too."""
    files = distribution("uv").files or []
    return next(Path(str(file.locate())) for file in files if file.name == "uv" and file.parent.name == "bin")


def _place_side_by_side(cell: Cell, layer: Layer, folder: Path) -> None:
    """Place the layer's side-by-side wheels into a subfolder each, named like their folder in the image."""
    folder.mkdir(parents=True)
    for item in cell.side_by_side:
        if item.layer == layer.name:
            wheel = fetch_pristine(item.package, item.version, [item.sha256])
            place(wheel, folder / item.folder / wheel.name)


def place_sources(cell: Cell, layer: Layer, lock_text: str, folder: Path) -> None:
    """Place what the source builds of a layer need: the environment, and recipes with their pin."""
    builds = [build for build in cell.build_from_source if build.package in layer.packages]
    settings = [f"{setting.name}='{setting.value}'" for build in builds for setting in build.env]
    write(folder / "env", "\n".join(settings) + "\n")
    for build in builds:
        if build.recipe:
            shutil.copytree(IMAGES / "sources" / build.recipe, folder / build.recipe)
            write(folder / build.recipe / "sdist.txt", source_pin(cell, build.package, lock_text))
        if build.edit:
            shutil.copy(IMAGES / "sources" / build.edit / "edit", folder / f"{build.package}.edit")
