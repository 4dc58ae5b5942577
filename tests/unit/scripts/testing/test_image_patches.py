"""A suite that runs the checkout's patched files is refused on an image with other ones."""

import io
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import docker.errors
import pytest

from scripts.errors import UserError
from scripts.matrix.load import find, load
from scripts.patches.apply import read_manifest
from scripts.patches.series import Series
from scripts.testing import credit, image_patches, in_image, records
from tests.unit.scripts.patches.test_apply import DIFF, build, make_wheel, series
from tests.unit.scripts.patches.test_leave_out import APART

CELL = find(load(), load().default)
FILE = f"/opt/venv/lib/python{CELL.python}/site-packages/rlhf_stack/patched.json"
REFUSED = r"the image has other patches than this checkout \(pkg/x.py\): rebuild it"


class Machine:
    """A fake of Docker with an image that was built with ``built``; the checkout has ``ours``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.folder, self.wheel = folder, make_wheel(folder)
        self.built: Series | None = series(DIFF)
        self.ours = series(DIFF)
        self.container = MagicMock(get_archive=self.get_archive)
        self.client: Any = SimpleNamespace(
            containers=SimpleNamespace(create=lambda image, labels: self.container),
            images=SimpleNamespace(get=lambda _: None),
        )
        monkeypatch.setattr(image_patches, "series_of", lambda _: [self.ours])
        monkeypatch.setattr(image_patches, "locked_hashes", lambda *_: [])
        monkeypatch.setattr(image_patches, "fetch_pristine", lambda *_: self.wheel)

    def get_archive(self, path: str) -> tuple[list[bytes], object]:
        """Return the packed manifests of the image in chunks, as Docker does."""
        if self.built is None:
            raise docker.errors.NotFound(path)
        assert path == FILE
        content = json.dumps([read_manifest(build(self.folder, self.built))]).encode()
        member, packed = tarfile.TarInfo(Path(path).name), io.BytesIO()
        member.size = len(content)
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.addfile(member, io.BytesIO(content))
        return [packed.getvalue()[:700], packed.getvalue()[700:]], {}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


@pytest.mark.parametrize("diffs", [(DIFF,), (DIFF, APART)])
def test_an_image_with_the_patches_of_the_checkout_is_accepted(
    diffs: tuple[str, ...], machine: Machine
) -> None:
    """Also if they have other headers or numbers: the files are compared."""
    machine.built, machine.ours = series(*diffs), series(*reversed(diffs), revision=2)
    image_patches.require_same(machine.client, CELL, "sha256:1")
    machine.container.remove.assert_called_once()


@pytest.mark.parametrize(
    ("built", "ours"),
    [
        (series(DIFF), series(DIFF.replace("+THREE", "+DREI"))),
        (series(DIFF), series(DIFF, APART)),
        (series(DIFF, APART), series(DIFF)),
        (series(DIFF), series()),
        (None, series(DIFF)),
    ],
    ids=["edited", "added", "dropped", "the last one dropped", "no manifest"],
)
def test_an_image_with_other_patches_is_refused(built: Series | None, ours: Series, machine: Machine) -> None:
    machine.built, machine.ours = built, ours
    with pytest.raises(UserError, match=REFUSED):
        image_patches.require_same(machine.client, CELL, "sha256:1")
    machine.container.remove.assert_called_once()


@pytest.mark.parametrize("suite", in_image.MARKED)
@pytest.mark.parametrize("arguments", [(), ("-k", "x")])
def test_a_refused_suite_neither_runs_nor_leaves_a_record(
    suite: str, arguments: tuple[str, ...], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.ours = series(APART)
    monkeypatch.setattr(records, "subject", lambda *_: None)
    monkeypatch.setattr(credit, "passed_before", lambda *_: None)
    tally = MagicMock()
    monkeypatch.setattr(credit, "recording", lambda *_: tally)
    run_suite = MagicMock()
    monkeypatch.setattr(in_image, "run_suite", run_suite)
    with pytest.raises(UserError, match=REFUSED):
        in_image.run_all(machine.client, CELL, in_image.Run(suite, "sha256:1", "title", arguments=arguments))
    run_suite.assert_not_called()
    tally.__enter__.assert_not_called()
