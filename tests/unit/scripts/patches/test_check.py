"""The checks of patches: expired ones, hunks that do not apply, and patches that need each other."""

from collections.abc import Mapping
from datetime import date, timedelta
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from scripts.errors import UserError
from scripts.patches import check, commands
from scripts.patches.series import PATCHES, Series, load_all, parse_patch
from tests.unit.scripts.patches.test_apply import DIFF, make_wheel, series
from tests.unit.scripts.patches.test_series import NAME, text

SECOND = "--- a/pkg/x.py\n+++ b/pkg/x.py\n@@ -2,3 +2,3 @@\n two\n-THREE\n+drei\n four\n"
APART = "--- a/pkg/x.py\n+++ b/pkg/x.py\n@@ -5,2 +5,2 @@\n five\n-six\n+SIX\n"
TESTS = {"tests/patches/test_it.py": '@pytest.mark.patch("pkg/1.0/0001-do-it")'}
APP = typer.Typer()
commands.register(APP)


@pytest.mark.parametrize("prefix", ["", "pkg-1.0.data/purelib/"])
def test_patches_that_apply_alone_and_together_are_accepted(tmp_path: Path, prefix: str) -> None:
    assert check.misfits(make_wheel(tmp_path, prefix), series(DIFF, APART)) == ([], [])


def test_a_cell_that_has_a_patch_for_others_is_named() -> None:
    carried = series(DIFF)
    carried.patches[0].header["Cells"] = "all"
    assert check.unnamed_cells(carried, ["a-cpu", "b-cuda13.0"]) == []
    carried.patches[0].header["Cells"] = "*-cuda13.0 *-rocm7"
    assert check.unnamed_cells(carried, ["a-cuda13.0", "b-rocm7"]) == []
    (problem,) = check.unnamed_cells(carried, ["a-cpu", "b-cuda13.0"])
    assert "0001-change.patch: Cells is '*-cuda13.0 *-rocm7', and a-cpu has the patch too" in problem


@pytest.mark.parametrize(
    ("diffs", "why"), [((DIFF, SECOND, APART), " without 0001-"), ((DIFF, DIFF), ": refresh it")]
)
def test_a_hunk_that_does_not_apply_is_named_with_what_it_needs(
    tmp_path: Path, diffs: tuple[str, ...], why: str
) -> None:
    (error,), _ = check.misfits(make_wheel(tmp_path), series(*diffs))
    assert f"patches/pkg/1.0/0002-change.patch: the hunk at pkg/x.py line 2 does not apply{why}" in error


def test_a_hunk_at_another_line_is_a_warning(tmp_path: Path) -> None:
    errors, warnings = check.misfits(
        make_wheel(tmp_path), series(DIFF.replace("@@ -2,3 +2,3", "@@ -3,3 +3,3"))
    )
    assert errors == []
    assert len(warnings) == 1
    assert (
        "pkg/1.0/0001-change.patch: hunk 1 applies at line 2, not at the line in its header: review"
        in warnings[0]
    )


def test_the_command_fails_for_one_and_reports_what_it_could_not_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, found = make_wheel(tmp_path), [(series(DIFF), ["0" * 64])]
    monkeypatch.setattr(check, "pinned", lambda: found)
    monkeypatch.setattr(commands, "load_all", list)
    monkeypatch.setattr(commands, "fetch_pristine", lambda *_: wheel)
    run = CliRunner().invoke
    assert run(APP, ["patches", "check"]).exit_code == 0
    found[0] = (series(SECOND), ["0" * 64])
    failed = run(APP, ["patches", "check"])
    assert failed.exit_code == 1
    assert "does not apply" in failed.output
    unreachable = MagicMock(side_effect=UserError("the package index cannot be reached"))
    monkeypatch.setattr(commands, "fetch_pristine", unreachable)
    unchecked = run(APP, ["patches", "check"])
    assert unchecked.exit_code == 0
    assert "not checked: whether patches of pkg 1.0 apply: the package index" in unchecked.output


def test_every_series_is_that_of_a_pinned_package() -> None:
    """One that no cell pins any more would never be checked again."""
    known = {(one.package, one.version) for one in load_all()}
    assert known == {(one.package, one.version) for one, _ in check.pinned()}


def one_patch(changes: Mapping[str, str | None] | None = None) -> Series:
    return Series("pkg", "1.0", 1, (parse_patch(NAME, text(changes)),))


@given(st.integers(-400, 400))
def test_a_patch_is_carried_until_its_review_date(days: int) -> None:
    today = date(2027, 5, 21) + timedelta(days=days)
    found = check.expired(one_patch(), today, TESTS)
    assert bool(found) == (days > 0)
    assert all("Review-By 2027-05-21 has passed" in problem for problem in found)


@pytest.mark.parametrize(
    ("release", "dropped"), [("0.9", True), ("1.0", True), ("1.0.1", False), ("1.10", False)]
)
def test_a_patch_that_the_pinned_release_has_is_to_be_dropped(release: str, dropped: bool) -> None:
    one = one_patch({"Applied-Upstream": release})
    found = check.expired(one, date(2027, 1, 1), TESTS)
    assert [f"since {release}" in problem and "drop the patch" in problem for problem in found] == [
        True
    ] * dropped


def test_a_patch_for_another_version_is_an_error() -> None:
    found = check.expired(one_patch({"Applies-To": "pkg==2.0"}), date(2027, 1, 1), TESTS)
    assert len(found) == 1
    assert "Applies-To is 'pkg==2.0', expected 'pkg==1.0'" in found[0]


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ({}, "its test tests/patches/test_it.py does not exist"),
        (
            {"tests/patches/test_it.py": 'patch("pkg/1.0/0002-do-it")'},
            'no test of tests/patches/test_it.py proves it: expected the mark patch("pkg/1.0/0001-do-it")',
        ),
    ],
)
def test_a_patch_without_its_test_is_an_error(tests: dict[str, str], problem: str) -> None:
    [found] = check.expired(one_patch(), date(2027, 1, 1), tests)
    assert problem in found


def test_every_patch_of_this_repository_can_be_read_and_has_its_test() -> None:
    found = load_all()
    folders = sorted(file.parent for file in PATCHES.glob("*/*/series"))
    assert [(one.package, one.version) for one in found] == [(at.parent.name, at.name) for at in folders]
    for one in found:
        assert check.expired(one, date(2026, 11, 23), check.existing_tests()) == []


def test_the_command_lists_the_patches() -> None:
    listed = CliRunner().invoke(APP, ["patches", "list"], env={"COLUMNS": "200"})
    assert listed.exit_code == 0
    assert "openrlhf" in listed.output
