"""The digest of the tests of a suite: a record is about these tests and no others.

It covers the declaration of the suite (folder, marks, strict), every file of its folder and of what it
``reads``, ``tests/conftest.py``, and the code that starts the suite. A suite on the host runs code of this
repository, so all modules of ``scripts`` and ``tests`` that its files import are covered, directly or through
others. A suite inside the image can import only the image's own code, which the inputs digest covers.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from scripts.digests import sha256, sha256_file
from scripts.matrix.suites import SUITES
from scripts.paths import ROOT

STARTED_BY = {"image": "scripts/testing/in_image.py", "host": "scripts/testing/on_host.py"}
COMMANDS = {
    "demo": "scripts/testing/demo.py",
    "hip": "scripts/hip/prove.py",
    "known-bad": "scripts/testing/known_bad.py",
}


def suite_digest(suite: str, root: Path = ROOT) -> str:
    """Return the sha256, in hex, of the tests of a suite in the checkout ``root``."""
    declared = SUITES[suite]
    files = {root / (COMMANDS.get(suite) or STARTED_BY[declared.place])}
    if declared.folder:
        files |= {root / "tests" / "conftest.py", *_files(root / "tests" / declared.folder)}
    files |= {file for path in declared.reads for file in _files(root / path)}
    if declared.place != "image":
        files = closure(files, root)
    content = {str(file.relative_to(root)): sha256_file(file) for file in files}
    return sha256(
        msgspec.json.encode([declared.folder, declared.marks, declared.strict, content], order="sorted")
    )


def closure(files: Iterable[Path], root: Path = ROOT) -> set[Path]:
    """Return ``files`` and all modules of ``scripts`` and ``tests`` that they import, also in functions."""
    found: set[Path] = set()
    waiting = list(files)
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            if file.suffix == ".py":
                waiting += [path for name in _imported(file) for path in _modules(name, root)]
    return found


def _files(path: Path) -> Iterator[Path]:
    """Yield the file ``path``, or the files below the folder ``path``."""
    found = [path] if path.is_file() else path.rglob("*")
    return (file for file in found if file.is_file() and file.suffix != ".pyc")


def _imported(file: Path) -> Iterator[str]:
    """Yield the names that a module imports: for ``from a.b import c`` both ``a.b`` and ``a.b.c``."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _modules(name: str, root: Path) -> Iterator[Path]:
    """Yield the file of a module of ``scripts`` or ``tests`` and those of the packages around it."""
    parts = name.split(".")
    if parts[0] in {"scripts", "tests"}:
        for length in range(1, len(parts) + 1):
            path = root.joinpath(*parts[:length])
            yield from (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file())
