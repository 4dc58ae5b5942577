"""The table of faults has a row for each case that was run, and names the others."""

import datetime
from pathlib import Path

import msgspec
import pytest

from scripts.errors import UserError
from scripts.matrix.load import expand, load
from scripts.release import catalogue, fault_cases, render
from scripts.release.fault_cases import FAULTS, Case
from scripts.testing.records import encode
from scripts.testing.suite_digest import suite_digest
from tests.faults import injecting, trial
from tests.faults.runs import CHECKPOINTS, run_of
from tests.unit.git_command import git

WHEN = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
CASE = Case(
    cell="a-cell",
    image="sha256:" + "1" * 64,
    revision="a" * 40,
    when=WHEN,
    fault="node killed",
    phase="sync",
    outcome="ended",
    seconds=21.4,
    said="SyncError: rank 1 on 10.0.0.2 does not answer | `dead`",
    node_named=True,
    left=(),
    afterwards="resumes at step 3",
)


TESTED = msgspec.structs.replace(CASE, inputs="d" * 64, tests=suite_digest("faults"))


def rows(case: Case) -> list[str]:
    """Return the lines of the table that has only ``case``."""
    table = render.table(render.FAULT_COLUMNS, render.fault_table(case.cell, [case])["rows"])
    return table.splitlines()[2:]


def test_cases_that_were_not_run_are_reported() -> None:
    (run,) = rows(CASE)
    found = render.fault_table(CASE.cell, [CASE])
    assert (found["tested"], found["cases"]) == (1, sum(map(len, FAULTS.values())))
    assert found["absent"][0] == "node killed (separate: engine start, generation, training)"
    assert len(found["absent"]) == len(FAULTS)
    page = render.page(expand(load()), {}, [CASE])
    assert f"1 of {found['cases']} cases were run" in page
    assert f"Not run on an image of these inputs: {'; '.join(found['absent'])}." in page
    for expected in ("node killed | sync", "ends after 21 s", "| yes |", "nothing", "resumes at step 3"):
        assert expected in run
    assert run.replace("\\|", "").count("|") == len(render.FAULT_COLUMNS) + 1, (
        "the error's own bars are escaped"
    )
    assert run.count("`") == 2


def test_hangs_and_leftovers_are_counted() -> None:
    hung = msgspec.structs.replace(CASE, outcome="hangs", node_named=False, left=("process 7 vllm",))
    text = render.page(expand(load()), {}, [hung])
    assert "1 hung, 1 left something behind" in text
    assert "**hangs** (stopped after 21 s)" in text
    assert "process 7 vllm" in text
    assert "| no |" in text


def test_a_run_that_goes_on_has_no_error() -> None:
    going = msgspec.structs.replace(
        CASE, outcome="goes on", said="", node_named=False, afterwards="is not needed"
    )
    (line,) = rows(going)
    assert line.endswith(
        "| continues | ? | ? | ? | ? |  |  | nothing | is not needed | its tests are unknown |"
    )
    measured = msgspec.structs.replace(
        going, after=41.6, repaired=True, submissions=2, steps_lost=1, prompts_again=16, equal=True, refused=1
    )
    (line,) = rows(measured)
    assert line.endswith(
        "| continues, submitted again 2 times | 42 s, when the fault was removed | 1 | 16 | yes |  |  "
        "| nothing | is not needed (submissions refused before: 1) | its tests are unknown |"
    )
    (line,) = rows(msgspec.structs.replace(measured, submissions=1))
    assert "| continues, submitted again once |" in line
    (line,) = rows(msgspec.structs.replace(measured, left=None))
    assert "| yes |  |  |  | is not needed" in line, "not looked at while the run went on"
    different = msgspec.structs.replace(measured, equal=False)
    assert "| **no** |" in "".join(rows(different))


def test_all_attempts_are_kept_and_an_unknown_fault_dropped() -> None:
    newer = msgspec.structs.replace(CASE, when=WHEN + datetime.timedelta(1), seconds=5.0)
    other = msgspec.structs.replace(CASE, fault="meteorite")
    first = msgspec.structs.replace(CASE, phase="engine start")
    shared = msgspec.structs.replace(CASE, layout=fault_cases.HYBRID)
    assert fault_cases.merge([newer, other, shared], [CASE, first], {}) == [first, CASE, newer, shared]
    later = msgspec.structs.replace(newer, afterwards="starts from step 1")
    assert fault_cases.merge([CASE, newer], [later, CASE], {}) == [CASE, later]
    lines = render.fault_table(CASE.cell, [first, newer, shared])["rows"]
    assert [line[0] for line in lines] == ["separate"] * 2 + ["hybrid"]


def test_a_failed_attempt_stays_visible_after_a_better_one() -> None:
    hung = msgspec.structs.replace(CASE, outcome="hangs", left=("process 7 vllm",))
    better = msgspec.structs.replace(CASE, when=WHEN + datetime.timedelta(1))
    table = render.fault_table(CASE.cell, [hung, better])
    (line,) = table["rows"]
    assert line[2:5] == ("sync", "2, worst: hangs", "ends after 21 s")
    assert (table["tested"], table["hung"], table["left"]) == (1, 1, 1)


def test_the_cases_of_a_cell_are_of_the_same_inputs() -> None:
    """Also of another machine's image of these inputs."""
    older = msgspec.structs.replace(CASE, image="sha256:" + "2" * 64, phase="training")
    newer = msgspec.structs.replace(CASE, when=WHEN + datetime.timedelta(1))
    assert fault_cases.merge([older], [newer], {}) == [newer]
    table = render.fault_table("a-cell", [older, newer])
    assert (table["tested"], table["images"]) == (1, "`111111111111`")
    built = {older.image: "a" * 64, newer.image: "a" * 64}
    assert fault_cases.merge([older], [newer], built) == [newer, older]
    table = render.fault_table("a-cell", [older, newer], "a" * 64, built)
    assert (table["tested"], table["images"]) == (2, "`111111111111`, `222222222222`")
    assert not table["outdated"]


def test_cases_of_an_image_that_was_not_measured_replace_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    merged: list[list[Case]] = []
    monkeypatch.setattr(fault_cases, "CASES", tmp_path)
    monkeypatch.setattr(fault_cases, "load", list)
    monkeypatch.setattr(fault_cases, "save", merged.append)
    (tmp_path / CASE.cell).mkdir()
    (tmp_path / CASE.cell / "case.json").write_bytes(encode(CASE))
    reason = "case.json in .* was not measured: run python -m scripts catalogue, then fault-table"
    with pytest.raises(UserError, match=reason):
        fault_cases.update()
    assert not merged
    (tmp_path / CASE.cell / "case.json").write_bytes(encode(TESTED))
    assert fault_cases.update() == 1
    assert merged == [[TESTED]], "the digest of its inputs is known without a measurement"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (TESTED, "none"),
        (CASE, "its tests are unknown"),
        (msgspec.structs.replace(TESTED, tests="e" * 64), "its tests changed since"),
        (msgspec.structs.replace(TESTED, revision="a-dirty"), "uncommitted changes"),
    ],
)
def test_why_a_case_proves_less_than_it_says_is_in_its_row(case: Case, expected: str) -> None:
    (line,) = rows(case)
    assert line.endswith(f"| resumes at step 3 | {expected} |")


def test_the_inputs_of_a_case_decide_also_without_a_measurement_of_its_image() -> None:
    rebuilt = msgspec.structs.replace(TESTED, image="sha256:" + "2" * 64, when=WHEN + datetime.timedelta(1))
    assert fault_cases.merge([TESTED], [rebuilt], {}) == [TESTED, rebuilt]
    assert not render.fault_table("a-cell", [TESTED, rebuilt], TESTED.inputs)["outdated"]
    assert fault_cases.merge([CASE], [rebuilt], {CASE.image: TESTED.inputs}) == [CASE, rebuilt]


class Checkout:
    """A git repository with a file of cases."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "images" / "faults.json"
        self.path.parent.mkdir()
        git(self.folder, "init", "--initial-branch=main")

    def save(self, *cases: Case) -> None:
        fault_cases.save(cases, self.path)

    def commit(self) -> None:
        git(self.folder, "add", ".")
        git(self.folder, "commit", "-m", "x")

    def removed(self) -> list[str]:
        return fault_cases.removed(self.folder)


def test_a_case_that_was_removed_from_the_history_is_reported(tmp_path: Path) -> None:
    """Cases of other inputs than the newest ones, and of a fault that is unknown, are dropped by `merge`."""
    checkout = Checkout(tmp_path)
    checkout.path.write_text('[{"of": "another structure"}]', encoding="utf-8")
    checkout.commit()
    hung = msgspec.structs.replace(TESTED, outcome="hangs")
    better = msgspec.structs.replace(TESTED, when=WHEN + datetime.timedelta(1))
    checkout.save(hung, msgspec.structs.replace(TESTED, fault="meteorite"))
    checkout.commit()
    assert checkout.removed() == []
    checkout.save(better)
    (line,) = checkout.removed()
    case = "the case a-cell, separate, node killed, sync of 2026-11-21 00:00 was removed"
    assert line.startswith(f"images/faults.json: {case}")
    checkout.commit()
    assert checkout.removed() == [line], "also once it is committed"
    checkout.save(msgspec.structs.replace(better, inputs="e" * 64))
    assert checkout.removed() == [], "cases of the newest inputs replace all others"
    checkout.path.unlink()
    assert len(checkout.removed()) == 2


def test_a_case_that_a_merge_has_dropped_is_reported(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    first, second = CASE, msgspec.structs.replace(CASE, phase="training")
    checkout.save(first)
    checkout.commit()
    git(checkout.folder, "checkout", "-b", "side")
    checkout.save(first, second)
    checkout.commit()
    git(checkout.folder, "checkout", "main")
    (tmp_path / "other").write_text("", encoding="utf-8")
    checkout.commit()
    git(checkout.folder, "merge", "--strategy=ours", "side")
    (line,) = checkout.removed()
    assert "training" in line


def test_the_check_of_the_catalogue_reports_removed_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_cases, "removed", lambda: ["a case was removed"])
    assert "a case was removed" in catalogue.check(offline=True)


def test_layouts_without_a_case_are_counted() -> None:
    table = render.fault_table("a-cell", [CASE])
    both = render.fault_table("a-cell", [CASE], layouts=(fault_cases.SEPARATE, fault_cases.HYBRID))
    assert both["cases"] == 2 * table["cases"]
    assert len(both["absent"]) == len(table["absent"]) + len(FAULTS)
    assert f"1 of {both['cases']} cases were run" in render.page(
        expand(load()), {}, [msgspec.structs.replace(CASE, cell="ray2.55.0-vllm0.29.0-cpu")]
    )


def test_cases_have_different_file_names(tmp_path: Path) -> None:
    for fault, phases in FAULTS.items():
        for phase in phases:
            fault_cases.write(msgspec.structs.replace(CASE, fault=fault, phase=phase), tmp_path)
    fault_cases.write(msgspec.structs.replace(CASE, when=WHEN + datetime.timedelta(1)), tmp_path)
    files = list(tmp_path.glob("a-cell/*.json"))
    assert len(files) == sum(map(len, FAULTS.values())) + 1
    kept = [msgspec.json.decode(file.read_bytes(), type=Case) for file in files]
    assert CASE in kept


@pytest.mark.parametrize("content", [encode(CASE)[:100], b"{}"], ids=["truncated", "without fields"])
def test_a_case_that_cannot_be_read_is_an_error(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_cases, "CASES", tmp_path)
    fault_cases.write(CASE, tmp_path)
    [file] = tmp_path.glob("*/*")
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"{file}: not a case \(.*\): remove it, or run it again"):
        fault_cases.update()


def test_a_case_is_only_replaced_by_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault_cases.write(CASE, tmp_path)

    def interrupted(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fault_cases.write(msgspec.structs.replace(CASE, afterwards="starts from step 1"), tmp_path)
    [file] = tmp_path.glob("*/*.json")
    assert msgspec.json.decode(file.read_bytes(), type=Case) == CASE


def test_a_file_that_was_written_by_hand_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text('[{"cell": 1}]', encoding="utf-8")
    with pytest.raises(UserError, match=r"faults\.json: .* written by `python -m scripts fault-table`"):
        fault_cases.load(path)
    assert fault_cases.load(tmp_path / "none.json") == []


def test_a_case_edited_by_hand_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    fault_cases.save([CASE], path)
    assert fault_cases.load(path) == [CASE]
    path.write_text(path.read_text(encoding="utf-8").replace("21.4", "2.4"), encoding="utf-8")
    with pytest.raises(UserError, match="its cases have another sha256"):
        fault_cases.load(path)


def test_cases_of_another_image_than_this_checkouts_are_reported() -> None:
    note = "Not verified yet on the image of this checkout"
    assert render.fault_table("a-cell", [CASE])["outdated"]
    assert not render.fault_table("a-cell", [CASE], CASE.image)["outdated"]
    assert note in render.page(expand(load()), {}, [CASE])


def test_the_page_has_the_table_and_is_stale_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = expand(load())
    readme = f"{render.BEGIN}\n{render.END}"
    before = catalogue.texts(cells, {}, readme)[catalogue.PAGE]
    monkeypatch.setattr(fault_cases, "load", lambda: [CASE])
    after = catalogue.texts(cells, {}, readme)[catalogue.PAGE]
    assert "resumes at step 3" in after
    assert before != after


def test_every_fault_of_the_table_can_be_injected() -> None:
    assert set(injecting.FAULTS) == set(FAULTS)


def test_a_fault_that_came_too_late_for_its_phase_is_reported() -> None:
    late = msgspec.structs.replace(CASE, in_time=False)
    (line,) = rows(late)
    assert "| sync, which had just ended |" in line


def test_every_cell_has_a_run_for_faults() -> None:
    runs = {cell.id: run_of(cell) for cell in expand(load())}
    for run in runs.values():
        assert CHECKPOINTS in run.arguments
        assert len({run.engine, run.trainer}) == 2


def test_a_submission_is_counted_once() -> None:
    lines = ["rlhf-stack: job raysubmit_1", "rlhf-stack: job raysubmit_1 failed: exit code 1", "other"]
    assert [bool(trial.SUBMITTED.fullmatch(line)) for line in lines] == [True, False, False]


@pytest.mark.parametrize(
    ("error", "named"),
    [
        ("PeerError: engine 0 on node one (10.0.0.3) is dead", True),
        ("(RolloutRayActor pid=154, ip=10.0.0.3) RuntimeError: Engine core initialization failed.", False),
        ("(RolloutRayActor pid=154, ip=10.0.0.3) (EngineCore pid=2) RuntimeError: 10.0.0.3 is gone", True),
        ("RuntimeError: Engine core initialization failed.", False),
    ],
)
def test_only_an_error_that_names_the_node_itself_does(error: str, named: bool) -> None:
    assert trial.names_one(error, ["10.0.0.3", "node one"]) is named
