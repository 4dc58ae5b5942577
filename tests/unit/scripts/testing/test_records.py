"""The record of a suite's run: what it counts, and that an altered, moved or removed one is an error."""

import contextlib
import datetime
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from scripts.digests import sha256
from scripts.errors import UserError
from scripts.images.inputs import INPUTS, image_labels
from scripts.matrix.load import expand, load
from scripts.matrix.suites import SUITES
from scripts.testing import records
from scripts.testing.records import Subject

CELL = next(cell for cell in expand(load()) if cell.is_default)
ON = Subject(CELL.id, "sha256:" + "a" * 64, "d" * 64)
JUNIT = """<testsuites><testsuite tests="5">
<testcase classname="patches.test_flash_attn" name="test_a"><properties>
<property name="patch" value="pkg/1.0/0001-a"/>
<property name="without" value="exit 1: ModuleNotFoundError: no"/>
<property name="patched" value="exit 0: ok"/>
</properties></testcase>
<testcase classname="patches.test_x" name="test_b"><failure message="no">x</failure></testcase>
<testcase classname="patches.test_x" name="test_c"><error message="no">x</error></testcase>
<testcase classname="patches.test_x" name="test_d"><skipped message="no GPU">x</skipped></testcase>
<testcase classname="patches.test_x" name="test_e"><skipped message="no
 GPU">x</skipped></testcase>
</testsuite></testsuites>"""
PASSED = '<testsuites><testsuite><testcase classname="a" name="b"/></testsuite></testsuites>'


@pytest.fixture
def junit(tmp_path: Path) -> Path:
    """A JUnit file as pytest writes it: passed, failed, error, skipped twice."""
    file = tmp_path / "junit.xml"
    file.write_text(JUNIT, encoding="utf-8")
    return file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of all records."""
    return tmp_path / "records"


def run(root: Path, junit: Path, text: str = PASSED, on: Subject = ON) -> records.Record:
    """Record a run of the suite image with these results; return the record."""
    junit.write_text(text, encoding="utf-8")
    with records.recording(on, "image", (root,)) as tally:
        tally.add(junit, 0)
    return records.read(on.cell, on.inputs, (root,))[-1]


def file_of(root: Path, record: records.Record) -> Path:
    return records.folder_of(record.cell, record.inputs, root) / records.file_name(record)


def test_a_run_is_counted_by_its_junit_file(junit: Path) -> None:
    tally = records.Tally()
    tally.add(junit, 1)
    assert (tally.passed, tally.failures, tally.code) == (
        1,
        ("patches.test_x::test_b", "patches.test_x::test_c"),
        1,
    )
    assert tally.skips == {"no GPU": 2}
    proof = records.Proof(
        "tests/patches/test_flash_attn.py",
        "test_a",
        "exit 1: ModuleNotFoundError: no",
        "exit 0: ok",
        "pkg/1.0/0001-a",
    )
    assert tally.proofs == [proof]


def test_a_test_that_runs_under_two_users_counts_once(junit: Path, tmp_path: Path) -> None:
    """With its worst outcome; one that only one of them can run has passed."""
    other = tmp_path / "other.xml"
    other.write_text(
        JUNIT.replace('<skipped message="no GPU">x</skipped>', "").replace(
            '<failure message="no">x</failure>', ""
        ),
        encoding="utf-8",
    )
    tally = records.Tally()
    tally.add(junit, 1)
    tally.add(other, 1)
    assert (tally.passed, len(tally.failures), tally.skips) == (2, 2, {"no GPU": 1})
    assert len(tally.evidence) == 2


def test_a_skipped_file_has_its_own_reason(tmp_path: Path) -> None:
    """As pytest writes it, for ``allow_module_level`` and for a missing module."""
    (tmp_path / "test_a.py").write_text(
        "import pytest\npytest.skip('no \"x\" (here)', allow_module_level=True)", encoding="utf-8"
    )
    (tmp_path / "test_c.py").write_text(
        'import pytest\npytest.skip("vLLM\'s own", allow_module_level=True)', encoding="utf-8"
    )
    (tmp_path / "test_b.py").write_text(
        "import pytest\n@pytest.mark.skipif(True, reason='not now')\ndef test_b(): pass", encoding="utf-8"
    )
    junit = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-q", "-p", "no:cacheprovider"]
    subprocess.run([*command, f"--junitxml={junit}", str(tmp_path)], capture_output=True, check=True)
    tally = records.Tally()
    tally.add(junit, 0)
    assert tally.skips == {'no "x" (here)': 1, "not now": 1, "vLLM's own": 1}


def test_a_run_that_ended_before_it_could_count_is_a_failure(root: Path, tmp_path: Path) -> None:
    with records.recording(ON, "image", (root,)) as tally:
        tally.add(tmp_path / "absent.xml", 0)
    assert records.read(ON.cell, ON.inputs, (root,))[0].outcome == "failed"


def test_a_passed_suite_is_recorded_with_what_it_was_run_on(root: Path, junit: Path) -> None:
    found = run(root, junit)
    assert (found.outcome, found.passed, found.failures) == ("passed", 1, ())
    assert (found.cell, found.image, found.inputs) == (ON.cell, ON.image, ON.inputs)
    assert len(found.tests) == 64
    assert found.when.tzinfo is not None
    [evidence] = found.evidence
    assert (records.folder_of(ON.cell, ON.inputs, root) / "evidence" / evidence).read_text() == PASSED
    assert records.altered_evidence(found, root) is None


def test_an_image_of_another_cell_is_not_recorded() -> None:
    labels = {**image_labels(CELL, "base", []), INPUTS: ON.inputs}
    image: Any = SimpleNamespace(id=ON.image, labels=labels)
    assert records.subject(CELL, image) == ON
    for wrong in ({INPUTS: ""}, {"io.rlhf-stacks.cell": "other"}):
        image.labels = labels | wrong
        with pytest.raises(UserError, match="is not an image of"):
            records.subject(CELL, image)


def test_an_error_is_recorded_as_a_failure_and_raised(root: Path) -> None:
    with pytest.raises(UserError, match="no space"), records.recording(ON, "demo", (root,)):
        raise UserError("no space")
    assert records.read(ON.cell, ON.inputs, (root,))[0].outcome == "failed"


def test_an_interrupted_suite_leaves_no_record(root: Path) -> None:
    with pytest.raises(KeyboardInterrupt), records.recording(ON, "demo", (root,)):
        raise KeyboardInterrupt
    assert records.read(ON.cell, ON.inputs, (root,)) == []


def test_every_attempt_is_kept(root: Path, junit: Path) -> None:
    for text in (JUNIT, PASSED, PASSED):
        run(root, junit, text)
    found = records.read(ON.cell, ON.inputs, (root,))
    assert [(record.attempt, record.outcome) for record in found] == [
        (1, "failed"),
        (2, "passed"),
        (3, "passed"),
    ]
    assert records.history(ON.cell, (root,)) == found


def test_a_removed_failure_is_an_error(root: Path, junit: Path) -> None:
    failed = run(root, junit, JUNIT)
    run(root, junit)
    file_of(root, failed).unlink()
    with pytest.raises(UserError, match="attempt 1 of the suite image was removed"):
        records.read(ON.cell, ON.inputs, (root,))
    with pytest.raises(UserError, match="was removed"), records.recording(ON, "image", (root,)):
        raise AssertionError("the suite runs")


def test_attempts_go_on_where_the_committed_ones_end(root: Path, junit: Path, tmp_path: Path) -> None:
    """In a fresh clone, which has only these."""
    first = run(root, junit, JUNIT)
    clone = tmp_path / "clone"
    with records.recording(ON, "image", (clone, root)) as tally:
        tally.add(junit, 0)
    assert records.read(ON.cell, ON.inputs, (clone, root))[0] == first
    assert [record.attempt for record in records.read(ON.cell, ON.inputs, (clone, root))] == [1, 2]


def test_attempts_of_merged_branches_are_ordered_by_time(
    root: Path, junit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each branch has an attempt 1: the later one is the last, in whichever order the files are."""
    start = records.now()
    for minutes in range(6):
        branch = tmp_path / f"branch {minutes}"
        monkeypatch.setattr(records, "now", partial(start.__sub__, datetime.timedelta(minutes=minutes)))
        run(branch, junit)
        shutil.copytree(branch, root, dirs_exist_ok=True)
    found = records.read(ON.cell, ON.inputs, (root,))
    assert [record.when for record in found] == sorted(record.when for record in found)
    assert [record.attempt for record in found] == [1] * 6


def test_the_last_attempt_of_merged_branches_is_the_latest_whatever_its_number(
    root: Path, junit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One branch repeated its failure at once; the other one failed later, at its first attempt."""
    start = records.now()
    for day, branch, text in ((0, "one", JUNIT), (1, "one", PASSED), (19, "two", JUNIT)):
        monkeypatch.setattr(records, "now", partial(start.__add__, datetime.timedelta(day)))
        run(tmp_path / branch, junit, text)
    for branch in ("one", "two"):
        shutil.copytree(tmp_path / branch, root, dirs_exist_ok=True)
    found = records.read(ON.cell, ON.inputs, (root,))
    assert [(record.attempt, record.outcome) for record in found] == [
        (1, "failed"),
        (2, "passed"),
        (1, "failed"),
    ]


def greener(file: Path) -> None:
    file.write_text(file.read_text().replace('"failed"', '"passed"'), encoding="utf-8")


def damaged(file: Path) -> None:
    file.write_text("{}", encoding="utf-8")


def not_utf8(file: Path) -> None:
    file.write_bytes(b'{"cell": "\xff"}')


def moved(file: Path) -> None:
    folder = file.parents[1] / ("e" * records.DIGITS)
    folder.mkdir()
    file.rename(folder / file.name)


def renamed(file: Path) -> None:
    file.rename(file.with_name("layers" + file.name.removeprefix("image")))


@pytest.mark.parametrize(
    ("change", "inputs", "reason"),
    [
        (greener, ON.inputs, "it was changed"),
        (damaged, ON.inputs, "not a test record"),
        (not_utf8, ON.inputs, "not a test record"),
        (moved, "e" * 64, "it is a record of"),
        (renamed, ON.inputs, "it was changed"),
    ],
)
def test_an_altered_record_is_an_error(
    change: Callable[[Path], None], inputs: str, reason: str, root: Path, junit: Path
) -> None:
    change(file_of(root, run(root, junit, JUNIT)))
    with pytest.raises(UserError, match=reason):
        records.read(ON.cell, inputs, (root,))


def test_a_record_of_another_cell_or_an_unknown_suite_is_an_error(root: Path, junit: Path) -> None:
    file = file_of(root, run(root, junit))
    copy = records.folder_of("other", ON.inputs, root) / file.name
    copy.parent.mkdir(parents=True)
    copy.write_bytes(file.read_bytes())
    with pytest.raises(UserError, match=f"it is a record of {CELL.id}"):
        records.read("other", ON.inputs, (root,))
    records.write(msgspec.structs.replace(run(root, junit), suite="lint"), roots=(root,))
    with pytest.raises(UserError, match="there is no suite lint"):
        records.read(ON.cell, ON.inputs, (root,))


def test_altered_evidence_is_reported(root: Path, junit: Path) -> None:
    record = run(root, junit, JUNIT)
    assert records.altered_evidence(record, root) is None
    more = msgspec.structs.replace(record, passed=999)
    assert records.altered_evidence(more, root) == "its JUnit files have other counts"
    file = records.folder_of(ON.cell, ON.inputs, root) / "evidence" / record.evidence[0]
    file.write_text(PASSED, encoding="utf-8")
    assert records.altered_evidence(record, root) == f"{file.name} was changed"
    file.unlink()
    assert records.altered_evidence(record, root) == f"{file.name} is missing"
    assert (
        records.altered_evidence(msgspec.structs.replace(record, evidence=()), root) == "it has no evidence"
    )


def test_the_default_cell_requires_every_suite_but_the_faults_and_those_of_recipes() -> None:
    assert set(records.required(CELL)) == set(SUITES) - {"faults", "hip"}
    others = [cell for cell in expand(load()) if not cell.is_default]
    assert not any({"registry", "known-bad"} & set(records.required(cell)) for cell in others)


def test_a_proof_of_an_older_record_names_no_patch() -> None:
    older = b'{"file":"f","test":"t","pristine":"exit 1: no","patched":"exit 0: ok"}'
    proof = msgspec.json.decode(older, type=records.Proof)
    assert proof == records.Proof("f", "t", "exit 1: no", "exit 0: ok")
    assert msgspec.json.encode(proof) == older


def test_a_truncated_junit_file_is_a_failure_and_stays_readable(root: Path, junit: Path) -> None:
    found = run(root, junit, PASSED[:40])
    assert (found.outcome, found.passed) == ("failed", 0)
    assert [Path(name).suffix for name in found.evidence] == [".broken"]
    assert records.altered_evidence(found, root) is None


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (PASSED[:40], "cannot be read"),
        ("<testsuites/>", "its JUnit files have other counts"),
    ],
    ids=["truncated, of an older record", "without tests"],
)
def test_a_junit_file_that_supports_no_pass_is_reported(
    text: str, wrong: str, root: Path, junit: Path
) -> None:
    record = run(root, junit)
    name = f"{sha256(text.encode())}.xml"
    (records.folder_of(ON.cell, ON.inputs, root) / "evidence" / name).write_text(text, encoding="utf-8")
    found = records.altered_evidence(msgspec.structs.replace(record, evidence=(name,)), root)
    assert found is not None
    assert found.endswith(wrong)


def test_tests_that_change_while_they_run_prove_nothing(
    root: Path, junit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = iter(["a" * 64, "b" * 64])
    monkeypatch.setattr(records, "suite_digest", lambda _: next(digests))
    with pytest.raises(UserError, match="the tests of image changed while they ran: run them again"):
        run(root, junit)
    assert records.read(ON.cell, ON.inputs, (root,))[0].outcome == "failed"


@pytest.mark.parametrize(("suite", "outcome"), [("unit", "failed"), ("image", "passed")])
def test_a_commit_during_a_run_changes_what_a_check_is_about_but_no_suite(
    suite: str, outcome: str, root: Path, junit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = Subject(records.CHECKOUT, "", "c" * 40) if suite == "unit" else ON
    commits = iter(["c" * 40, "e" * 40])
    monkeypatch.setattr(records, "revision", lambda: next(commits))
    junit.write_text(PASSED, encoding="utf-8")
    with contextlib.suppress(UserError), records.recording(on, suite, (root,)) as tally:
        tally.add(junit, 0)
    assert records.read(on.cell, on.inputs, (root,))[0].outcome == outcome


@pytest.mark.parametrize("passes_first", [True, False])
def test_a_skip_in_one_setting_alone_is_noted(passes_first: bool, junit: Path, tmp_path: Path) -> None:
    passing = tmp_path / "passing.xml"
    passing.write_text(PASSED, encoding="utf-8")
    junit.write_text(PASSED.replace("/></", '><skipped message="odd"/></testcase></', 1), encoding="utf-8")
    tally = records.Tally()
    for file in (passing, junit) if passes_first else (junit, passing):
        tally.add(file, 0)
    assert (tally.passed, tally.skips, tally.skip_reasons) == (1, {}, {"odd"})
