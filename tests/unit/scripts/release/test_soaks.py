"""Runs under many faults: what runs again, what is reported, and what is added to the catalogue."""

import datetime
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from scripts.errors import UserError
from scripts.matrix.load import Cell, expand, find, load
from scripts.release import catalogue, render, soaks
from scripts.release.soaks import Fault, Soak
from scripts.testing import demo, records
from scripts.testing.records import Subject
from tests.bench import soak as bench
from tests.bench.soak import Run
from tests.network import links

WHEN = datetime.datetime(2026, 11, 28, tzinfo=datetime.UTC)
SOAK = Soak(
    cell=load().default,
    image="sha256:" + "1" * 64,
    inputs="d" * 64,
    tests=soaks.tests(),
    revision="a" * 40,
    when=WHEN,
    undisturbed_when=WHEN,
    steps=100,
    seed=3,
    ended=0,
    seconds=(1320.0, 600.0),
    same_rewards=True,
    same_weights=True,
    left=(),
    submissions=4,
    steps_repeated=0,
    prompts_again=24,
    recoveries=(20.0, 40.0, 33.0),
    faults=(Fault("link cut", "one", 41.2, 60.0),),
)
ROW = dict(zip(render.SOAK_COLUMNS, render.soak_row("name", SOAK, SOAK.inputs), strict=True))
OLDER = "ray2.12.0-vllm0.4.2-cpu"


def changed(**changes: Any) -> Soak:
    return msgspec.structs.replace(SOAK, **changes)


def row(soak: Soak, inputs: str = SOAK.inputs) -> dict[str, str]:
    return dict(zip(render.SOAK_COLUMNS, render.soak_row("name", soak, inputs), strict=True))


def test_a_row_has_the_figures_of_the_report() -> None:
    assert ROW["time"] == "2.20 times the undisturbed run; limit 2.5: met"
    assert (ROW["faults"], ROW["restarts of engines"], ROW["median restart, s"]) == ("1", "3", "33")
    assert (ROW["outcome"], ROW["reservations"]) == ("passed", "none")
    assert ROW["seconds under faults / undisturbed"] == "1320 / 600"
    assert ROW["timeline"] == "[plot](soaks/name.png)"


def test_a_slow_run_passes_but_does_not_meet_the_limit() -> None:
    slow = changed(seconds=(1501.0, 600.0))
    assert row(slow)["time"].endswith("limit 2.5: not met")
    assert slow.failures == []


def test_each_difference_from_the_undisturbed_run_is_a_failure() -> None:
    worst = changed(ended=1, same_rewards=False, same_weights=False, left=("actor A",), recoveries=())
    assert (
        row(worst)["outcome"] == "ended with exit code 1; other rewards; other weights; left behind: actor A"
    )
    assert row(worst)["median restart, s"] == "0"


def test_why_a_soak_proves_less_than_it_says_is_in_its_row() -> None:
    assert row(SOAK, "e" * 64)["reservations"] == "**not verified yet**: other inputs"
    doubtful = changed(tests="e" * 64, revision="a-dirty")
    assert row(doubtful)["reservations"] == "its tests changed since; uncommitted changes"


def write(reports: Path, soak: Soak, name: str) -> None:
    folder = reports / soak.cell / name
    folder.mkdir(parents=True)
    (folder / soaks.REPORT).write_bytes(records.encode(soak))
    (folder / soaks.TIMELINE).write_bytes(name.encode())


def test_reports_are_added_once_with_their_plots(tmp_path: Path) -> None:
    reports, committed = tmp_path / "reports", tmp_path / "soaks"
    later = changed(when=WHEN + datetime.timedelta(1), ended=1)
    write(reports, later, "a")
    write(reports, SOAK, "b")
    (reports / SOAK.cell / "undisturbed-1").mkdir()
    assert (soaks.add(reports, committed), soaks.add(reports, committed)) == (2, 0)
    found = soaks.load(committed)
    assert list(found.values()) == [SOAK, later]
    assert [(committed / f"{name}.png").read_text(encoding="utf-8") for name in found] == ["b", "a"]


def test_a_report_that_was_changed_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "reports", SOAK, "a")
    soaks.add(tmp_path / "reports", tmp_path)
    (file,) = tmp_path.glob("*.json")
    file.write_text(file.read_text(encoding="utf-8").replace("1320", "1000"), encoding="utf-8")
    with pytest.raises(UserError, match="was changed"):
        soaks.load(tmp_path)
    file.write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="not the report of a soak"):
        soaks.load(tmp_path)


@pytest.mark.parametrize("change", [lambda plot: plot.write_bytes(b"flatter"), Path.unlink])
def test_a_plot_that_was_changed_or_removed_is_an_error(
    change: Callable[[Path], object], tmp_path: Path
) -> None:
    write(tmp_path / "reports", SOAK, "a")
    soaks.add(tmp_path / "reports", tmp_path)
    (plot,) = tmp_path.glob("*.png")
    change(plot)
    with pytest.raises(UserError, match=f"{plot.stem}.*restore"):
        soaks.load(tmp_path)


def test_a_plot_that_was_drawn_again_adds_nothing(tmp_path: Path) -> None:
    write(tmp_path / "reports", SOAK, "a")
    soaks.add(tmp_path / "reports", tmp_path)
    (tmp_path / "reports" / SOAK.cell / "a" / soaks.TIMELINE).write_bytes(b"drawn again")
    assert soaks.add(tmp_path / "reports", tmp_path) == 0


def test_an_older_report_is_an_error(tmp_path: Path) -> None:
    """Such as that of 2026-11-25, which lacks digests."""
    write(tmp_path, SOAK, "a")
    file = tmp_path / SOAK.cell / "a" / soaks.REPORT
    older = {name: field for name, field in msgspec.to_builtins(SOAK).items() if name != "inputs"}
    file.write_bytes(msgspec.json.encode(older))
    with pytest.raises(UserError, match=rf"{file}: .*`inputs`.*: remove it, or run the soak again"):
        soaks.add(tmp_path, tmp_path / "soaks")


def test_the_page_has_the_soaks(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = expand(load())
    readme = f"{render.BEGIN}\n{render.END}"
    monkeypatch.setattr(soaks, "load", lambda: {})
    assert "## Runs under many faults" not in catalogue.texts(cells, {}, readme)[catalogue.PAGE]
    monkeypatch.setattr(soaks, "load", lambda: {"name": SOAK})
    page = catalogue.texts(cells, {}, readme)[catalogue.PAGE]
    assert "## Runs under many faults" in page
    assert "limit 2.5: met | passed | [plot](soaks/name.png) | **not verified yet**: other inputs |" in page


@pytest.mark.parametrize("cell", [OLDER, "ray2.55.0-vllm0.29.0-cuda13.0"])
def test_a_cell_without_the_flags_of_the_run_is_refused(cell: str) -> None:
    with pytest.raises(UserError, match=f"--cell {cell}: this run has flags of OpenRLHF 0.11 and no GPUs"):
        bench.chosen_cell(cell)
    assert bench.chosen_cell(None).is_default


class Machine:
    """Fakes of Docker, a cluster and runs; ``trained`` has the seed of each run, None without faults."""

    def __init__(self) -> None:
        self.trained: list[int | None] = []
        self.image, self.code = "sha256:1", 0

    def train(self, _: object, cell: Cell, folder: Path, log: Path, steps: int, seed: int | None) -> Run:
        self.trained.append(seed)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"{seed}", encoding="utf-8")
        return Run(WHEN, self.code, 10.0, rewards={1: 0.5}, weights="w", steps=[(1, 2.0)])

    @contextmanager
    def cluster(self, *_: object, **__: object) -> Iterator[object]:
        yield self


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    fake = Machine()
    monkeypatch.setattr(soaks, "REPORTS", tmp_path)
    for name, value in {
        "connect": lambda: SimpleNamespace(images=SimpleNamespace(get=lambda _: None)),
        "Cluster": fake.cluster,
        "train": fake.train,
        "left_behind": lambda _: [],
        "local_image": lambda *_: "",
    }.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(links, "obstacle", lambda: "")
    monkeypatch.setattr(demo, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(records, "subject", lambda cell, _: Subject(cell.id, fake.image, "d" * 64))
    return fake


CELL = find(load(), load().default)


def test_seeds_share_the_undisturbed_run_of_an_image_and_its_steps(machine: Machine, tmp_path: Path) -> None:
    for seed in (1, 2):
        report = bench.soak(CELL, 5, seed, None)
        assert report.failures == []
    assert machine.trained == [None, 1, 2]
    bench.soak(CELL, 6, 2, None)
    machine.image = "sha256:2"
    bench.soak(CELL, 6, 2, tmp_path / "elsewhere")
    assert machine.trained[3:] == [None, 2, None, 2]
    assert (
        msgspec.json.decode((tmp_path / "elsewhere" / soaks.REPORT).read_bytes(), type=Soak).image
        == "sha256:2"
    )
    logs = sorted(
        file.read_text(encoding="utf-8") for file in tmp_path.glob(f"{CELL.id}/seed-*/disturbed.log")
    )
    assert logs == ["1", "2", "2"], "no run overwrites another one's files"
    assert soaks.add(tmp_path, tmp_path / "soaks") == 3


def test_an_undisturbed_run_that_failed_is_an_error_and_is_repeated(machine: Machine) -> None:
    machine.code = 1
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"the undisturbed run ended with exit code 1: .*undisturbed\.log"
        ):
            bench.soak(CELL, 5, 1, None)
    assert machine.trained == [None, None]


@pytest.mark.parametrize(
    ("soak", "code"), [(SOAK, 0), (changed(seconds=(9.0, 1.0)), 0), (changed(same_weights=False), 1)]
)
def test_only_the_result_decides_the_exit_code(
    soak: Soak, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["soak", "--json"])
    monkeypatch.setattr(bench, "soak", lambda *_: soak)
    assert bench.main() == code
    assert soak.time in capsys.readouterr().out
