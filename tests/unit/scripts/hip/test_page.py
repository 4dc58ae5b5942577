"""The tables of docs/amd.md: derived from the last record, and marked when what is compiled has changed."""

import datetime
import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from scripts.cli import app
from scripts.errors import UserError
from scripts.hip import page, recipes
from scripts.hip.inspection import Package
from scripts.hip.prove import NO_SCRATCH, Compiled, Executed, Report
from scripts.matrix.load import find, load
from scripts.release.kernels import Kernel
from scripts.testing import records
from scripts.testing.records import Record, Tally

TESTS = "7" * 64
CELL = "ray2.12.0-vllm0.4.2-rocm6.1"
EMPTY = f"Before.\n\n{page.BEGIN}\n{page.END}\n\nAfter.\n"
SPILLED = (Kernel("attention", "gfx90a", 1024, 64, 181, 0),)
PACKAGE = Package("v.whl", "0" * 64, 1, {"gfx90a": 9}, {"gfx90a": 351}, 26624, SPILLED, {}, {}, ())


def executed(size: int, error: float | None, reason: str = "") -> Executed:
    return Executed("paged_attention_v1", "float32", size, "gfx90a", 0.1, error, 1e-5, reason)


@pytest.fixture(autouse=True)
def _digest_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "suite_digest", lambda _: TESTS)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """A record and its report, below ``tmp_path``."""
    ran = (executed(64, 2e-7), executed(128, 4e-7), executed(256, None, NO_SCRATCH), executed(80, 0.5))
    report = Report({"hip5.7": Compiled("HIP version: 5.7", {"vllm_rocm_ops": PACKAGE}, ran)})
    tally = Tally()
    tally.attach(msgspec.json.encode(report), ".json")
    digest = recipes.digest(load(), find(load(), CELL))
    made = Record(
        cell=CELL,
        image="hip5.7",
        inputs=digest,
        suite="hip",
        tests=TESTS,
        revision="a" * 40,
        when=datetime.datetime(2026, 11, 24, tzinfo=datetime.UTC),
        seconds=1.0,
        outcome="failed",
        passed=3,
        evidence=tuple(tally.evidence),
    )
    return records.write(made, tally.evidence, (tmp_path,))


def test_without_a_record_the_page_says_how_to_get_one(tmp_path: Path) -> None:
    text = page.text(load(), EMPTY, tmp_path)
    assert text == f"Before.\n\n{page.BEGIN}\n{page.NOTHING}{page.END}\n\nAfter.\n"


def test_a_page_without_both_markers_is_an_error_and_not_cut_off(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"docs/amd\.md: expected the lines"):
        page.text(load(), EMPTY.replace(page.END, ""), tmp_path)


@pytest.mark.usefixtures("record")
def test_the_tables_have_each_outcome_and_writing_them_again_changes_nothing(tmp_path: Path) -> None:
    text = page.text(load(), EMPTY, tmp_path)
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert (
        "| vllm_rocm_ops | hip5.7 | gfx90a | 9 | 351 | 26624 bytes | 1, at most 181 vector registers |"
        in text
    )
    assert (
        "| paged_attention_v1 | float32 | hip5.7 | head sizes 64, 128: equal, error at most 4.0e-07; "
        f"head size 256: not executed, {NO_SCRATCH}; head size 80: wrong, error 5.0e-01 |"
    ) in text
    assert "\nNothing of this was run on an AMD GPU.\n" in text
    assert "Not verified yet" not in text
    assert page.text(load(), text, tmp_path) == text


def test_an_incomplete_compilation_has_a_row_for_each_source() -> None:
    outcomes = {"csrc/topk.hip": (1, ""), "csrc/attention.hip": (0, "not reached")}
    report = Report({"hip7.2": Compiled("HIP version: 7.2", {}, sources=outcomes)})
    assert page._sources(report) == [
        ("`csrc/attention.hip`", "hip7.2", "not reached"),
        ("`csrc/topk.hip`", "hip7.2", "compiled"),
    ]


def test_a_complete_compilation_has_the_number_of_its_sources() -> None:
    outcomes = {"csrc/topk.hip": (1, ""), "csrc/attention.hip": (1, "")}
    report = Report({"hip7.2": Compiled("HIP version: 7.2", {}, sources=outcomes)})
    assert page._sources(report) == []
    assert list(page._what_ran(report)) == [
        "Nothing of this was run on an AMD GPU, and no kernel of it on the emulator.\n",
        "hip7.2 compiled all 2 sources that vLLM's CMake files list.\n",
    ]


@pytest.mark.usefixtures("record")
def test_another_recipe_is_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "digest", lambda *_: "f" * 64)
    assert "**Not verified yet**: what is compiled changed since." in page.text(load(), EMPTY, tmp_path)


@pytest.mark.usefixtures("record")
def test_other_tests_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "suite_digest", lambda _: "8" * 64)
    text = page.text(load(), EMPTY, tmp_path)
    assert "**Not verified yet**: the code of the proof changed since." in text


def test_each_attempt_on_the_same_inputs_is_listed(tmp_path: Path, record: Record) -> None:
    later = record.when + datetime.timedelta(days=1)
    again = msgspec.structs.replace(record, when=later, outcome="passed", revision=f"{'b' * 40}-dirty")
    failed = msgspec.structs.replace(again, outcome="failed", failures=("hip5.7 vllm_rocm_ops",))
    other = msgspec.structs.replace(record, suite="image")
    for one in (failed, again, other):
        records.write(one, {}, (tmp_path,))
    rows = [line for line in page.text(load(), EMPTY, tmp_path).splitlines() if "| 2026-11-2" in line]
    assert rows == [
        "| 1 | failed | 2026-11-24 | aaaaaaaaaaaa |  |",
        "| 2 | failed | 2026-11-25 | bbbbbbbbbbbb, with uncommitted changes | hip5.7 vllm_rocm_ops |",
        "| 3 | passed | 2026-11-25 | bbbbbbbbbbbb, with uncommitted changes |  |",
    ]


@pytest.mark.usefixtures("record")
def test_an_edited_report_is_an_error(tmp_path: Path) -> None:
    (file,) = tmp_path.rglob("evidence/*.json")
    report = json.loads(file.read_text())
    report["toolchains"]["hip5.7"]["compiler"] = "HIP version: 6.1"
    file.write_text(json.dumps(report))
    with pytest.raises(UserError, match="was changed: restore it"):
        page.text(load(), EMPTY, tmp_path)


def test_the_page_is_written_again_without_running_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "PAGE", tmp_path / "amd.md")
    page.PAGE.write_text(EMPTY)
    result = CliRunner().invoke(app, ["hip", "--check"])
    assert (result.exit_code, result.stderr.splitlines()[-1].rpartition(": ")[2]) == (
        1,
        "run python -m scripts hip --offline",
    )
    for option in ("--offline", "--check"):
        assert CliRunner().invoke(app, ["hip", option]).exit_code == 0
    assert "vllm_rocm_ops" in page.PAGE.read_text()


def test_a_record_is_kept_with_its_report(tmp_path: Path, record: Record) -> None:
    page.keep(record, tmp_path, tmp_path / "committed")
    kept = records.history(CELL, (tmp_path / "committed",))
    assert [one.evidence for one in kept] == [record.evidence]
    assert "351" in page.text(load(), EMPTY, tmp_path / "committed")
