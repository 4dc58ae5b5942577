"""Each way to run a suite asks whether it passed before, and ``again`` overrides the answer."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from scripts.images.inputs import INPUTS, image_labels
from scripts.matrix.load import find, load
from scripts.testing import credit, demo, demo_report, in_image, on_host, records

CELL = find(load(), load().default)
IMAGE: Any = SimpleNamespace(
    id="sha256:" + "a" * 64, labels={**image_labels(CELL, "b", []), INPUTS: "d" * 64}
)
JUNIT = '<testsuites><testsuite><testcase classname="a" name="b"/></testsuite></testsuites>'
CLIENT = MagicMock(**{"images.get.return_value": IMAGE})


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The suites that ran; records are in a temporary folder."""
    found: list[str] = []
    places: dict[str, Any] = {"roots": (tmp_path / "records",), "shared": tmp_path / "shared"}
    for name in ("passed_before", "recording"):
        monkeypatch.setattr(credit, name, functools.partial(getattr(credit, name), **places))
    folder_of = records.folder_of
    monkeypatch.setattr(
        records, "folder_of", lambda cell, inputs, root=tmp_path / "records": folder_of(cell, inputs, root)
    )
    monkeypatch.setattr(records, "revision", lambda: "c" * 40)

    def run(*_: Any, **__: Any) -> int:
        found.append("ran")
        return 0

    def pytest_on_host(_cell: Any, _suite: str, _arguments: Any, junit: Path) -> int:
        junit.write_text(JUNIT, encoding="utf-8")
        return run()

    def pytest_in_image(_client: Any, _cell: Any, _run: Any, _setting: Any, results: Path) -> int:
        (results / "junit.xml").write_text(JUNIT, encoding="utf-8")
        return run()

    def train(*_: Any) -> dict[str, Any]:
        run()
        return {"weights_equal": True, "seed": 0}

    monkeypatch.setattr(on_host, "_run_pytest", pytest_on_host)
    monkeypatch.setattr(in_image, "_run_in_container", pytest_in_image)
    monkeypatch.setattr(in_image, "test_tools", lambda _: tmp_path / "tools")
    monkeypatch.setattr(demo, "train_on_nodes", train)
    monkeypatch.setattr(demo, "build", lambda _: IMAGE.id)
    monkeypatch.setattr(demo, "connect", lambda: CLIENT)
    monkeypatch.setattr(demo, "folder", lambda _: tmp_path / "demo")
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo_report, "shortfall", lambda *_, **__: "")
    for module in (demo, in_image, on_host):
        monkeypatch.setattr(module, "kept", MagicMock(), raising=False)
    return found


def on_the_host(again: bool) -> None:
    assert on_host.run_suite(CLIENT, CELL, "network", [], again) == 0


def inside(again: bool) -> None:
    assert in_image.run_all(CLIENT, CELL, in_image.Run("cluster", IMAGE.id, "title", again=again)) == 0


def as_demo(again: bool) -> None:
    demo.run_demo(CELL, again=again)


@pytest.mark.parametrize("suite", [on_the_host, inside, as_demo])
def test_a_suite_that_passed_runs_only_again(
    suite: Callable[[bool], None], ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the demo, the second report is that of the first run."""
    reports: list[Any] = []
    monkeypatch.setattr(demo_report, "show", lambda report, _: reports.append(report))
    for again, runs in ((False, 1), (False, 1), (True, 2), (False, 2)):
        suite(again)
        assert len(ran) == runs
    assert all(report == {"weights_equal": True, "seed": 0} for report in reports)
