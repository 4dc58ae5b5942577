"""The image's trim tool, on a package made here."""

import runpy
import sys
from pathlib import Path

import pytest

from scripts.paths import ROOT

TOOL = ROOT / "images" / "tools" / "trim.py"


def trim(site_packages: Path, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the tool as the Dockerfile does."""
    listing = site_packages.parent / "trim.txt"
    listing.write_text(lines)
    monkeypatch.setattr(sys, "argv", ["trim.py", str(listing), str(site_packages)])
    runpy.run_path(str(TOOL), run_name="__main__")


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    """A package with tests of its own."""
    root = tmp_path / "site-packages"
    for name in ("pkg/__init__.py", "pkg/tests/test_a.py", "pkg/testing/b.py", "pkg/lib/data"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("content")
    record = root / "pkg-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    record.write_text("".join(f"{name},sha256=x,7\n" for name in names))
    return root


def test_removed_files_leave_the_record_too(site_packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RECORD lists exactly the remaining files; a folder with a similar name stays."""
    trim(site_packages, "remove pkg/tests\nremove pkg/nothing*\n", monkeypatch)
    listed = [
        line.split(",")[0] for line in (site_packages / "pkg-1.0.dist-info/RECORD").read_text().splitlines()
    ]
    assert listed == ["pkg/__init__.py", "pkg/lib/data", "pkg/testing/b.py"]
    assert all((site_packages / name).exists() for name in listed)
    assert not (site_packages / "pkg/tests").exists()


def test_only_libraries_are_stripped(site_packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A glob may catch a text file; it stays as it is, and so does RECORD."""
    before = (site_packages / "pkg-1.0.dist-info/RECORD").read_text()
    trim(site_packages, "strip pkg/lib/*\n", monkeypatch)
    assert (site_packages / "pkg/lib/data").read_text() == "content"
    assert (site_packages / "pkg-1.0.dist-info/RECORD").read_text() == before
