"""The digest of a suite's tests changes with its files and with what they import, and with nothing else."""

from pathlib import Path

import pytest

from scripts.matrix.suites import SUITES
from scripts.paths import ROOT
from scripts.testing.suite_digest import closure, suite_digest

FILES = {
    "tests/conftest.py": "def client():\n    from scripts.docker import client\n",
    "tests/image/test_a.py": "import torch\n",
    "tests/network/test_b.py": "from tests.network import links\n",
    "tests/network/links.py": "",
    "tests/network/__init__.py": "",
    "scripts/__init__.py": "",
    "scripts/docker/__init__.py": "",
    "scripts/docker/client.py": "import scripts.errors\n",
    "scripts/errors.py": "",
    "scripts/other.py": "",
    "scripts/testing/in_image.py": "",
    "scripts/testing/proofs.py": "",
    "scripts/patches/leave_out.py": "",
    "scripts/patches/changes.py": "",
    "scripts/testing/on_host.py": "",
    "scripts/testing/demo.py": "from scripts.errors import UserError\n",
    "images/examples/compose.yaml": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("suite", "changing"),
    [
        ("image", {"tests/conftest.py", "tests/image/test_a.py", "scripts/testing/in_image.py"}),
        (
            "patches",
            {
                *("tests/conftest.py", "scripts/testing/in_image.py", "scripts/testing/proofs.py"),
                *("scripts/patches/leave_out.py", "scripts/patches/changes.py"),
            },
        ),
        (
            "network",
            {
                *("tests/conftest.py", "tests/network/test_b.py", "tests/network/links.py"),
                *("tests/network/__init__.py", "scripts/__init__.py", "scripts/docker/__init__.py"),
                *("scripts/docker/client.py", "scripts/errors.py", "scripts/testing/on_host.py"),
                "images/examples/compose.yaml",
            },
        ),
        ("demo", {"scripts/testing/demo.py", "scripts/errors.py", "scripts/__init__.py"}),
    ],
)
def test_a_changed_file_of_the_tests_changes_the_digest(suite: str, changing: set[str], root: Path) -> None:
    before = suite_digest(suite, root)
    for name in FILES:
        text = (root / name).read_text()
        (root / name).write_text(text + "# changed\n", encoding="utf-8")
        assert (suite_digest(suite, root) != before) == (name in changing), name
        (root / name).write_text(text, encoding="utf-8")


def test_the_marks_of_a_suite_are_covered(root: Path) -> None:
    assert SUITES["cluster"].folder == SUITES["integration"].folder
    assert suite_digest("cluster", root) != suite_digest("integration", root)


def test_a_suite_of_the_host_covers_what_it_runs() -> None:
    found = {file.name for file in closure([ROOT / "tests" / "network" / "test_day.py"])}
    assert {"demo.py", "cluster.py", "diagnosis.py", "client.py"} <= found
