from collections.abc import Mapping
from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.errors import UserError
from scripts.patches import patch_series

HEADER = {
    "Description": "Do it",
    "Origin": "rlhf-stacks",
    "Bug": "none",
    "Forwarded": "no",
    "Applied-Upstream": "no",
    "Last-Update": "2026-11-21",
    "Applies-To": "pkg==1.0",
    "Cells": "all",
    "Test": "tests/patches/test_it.py",
    "Review-By": "2027-05-21",
}
DIFF = "--- a/pkg/x.py\n+++ b/pkg/x.py\n@@ -1,1 +1,1 @@\n-old\n+new\n"
NAME = "0001-do-it.patch"


def text(changes: Mapping[str, str | None] | None = None, diff: str = DIFF) -> str:
    header = {**HEADER, **(changes or {})}
    lines = [f"{name}: {value}" for name, value in header.items() if value is not None]
    return "\n".join(lines) + "\n---\n" + diff


def test_a_patch_is_its_header_and_its_files() -> None:
    patch = patch_series.parse_patch(NAME, text({"Description": "Do it\n for a reason\n and another"}))
    assert patch.title == "Do it"
    assert patch.header["Description"] == "Do it\nfor a reason\nand another"
    assert patch.files == ("pkg/x.py",)
    assert patch.diff == DIFF
    assert patch.review_by == date(2027, 5, 21)


@pytest.mark.parametrize("field", list(HEADER))
def test_a_header_that_lacks_a_field_is_refused(field: str) -> None:
    with pytest.raises(UserError, match=f"{NAME}: the header lacks {field}"):
        patch_series.parse_patch(NAME, text({field: None}))


def test_an_unknown_field_is_refused_with_its_line() -> None:
    with pytest.raises(UserError, match=r"0001-do-it.patch:11: unknown field 'Autor'"):
        patch_series.parse_patch(NAME, text({"Autor": "me"}))


def test_a_field_that_stands_twice_is_refused() -> None:
    with pytest.raises(UserError, match="field Bug stands twice"):
        patch_series.parse_patch(NAME, "Bug: 1\n" + text())


def test_a_date_is_a_date() -> None:
    with pytest.raises(UserError, match="Review-By: 'soon': expected a date"):
        patch_series.parse_patch(NAME, text({"Review-By": "soon"}))


def test_what_upstream_has_is_a_release() -> None:
    with pytest.raises(UserError, match="Applied-Upstream: 'main': expected no, or a release"):
        patch_series.parse_patch(NAME, text({"Applied-Upstream": "main"}))


def test_a_diff_must_change_something() -> None:
    with pytest.raises(UserError, match="changes no file"):
        patch_series.parse_patch(NAME, text(diff=""))


def test_a_patch_without_a_diff_is_refused() -> None:
    with pytest.raises(UserError, match="a line '---' and a diff"):
        patch_series.parse_patch(NAME, "Description: x\n")


@pytest.mark.parametrize("name", ["1-x.patch", "0001_x.patch", "0001-X.patch", "0001-x.diff", "0001-.patch"])
def test_a_patch_has_a_number_and_a_name(name: str) -> None:
    with pytest.raises(UserError, match="expected a name such as"):
        patch_series.parse_patch(name, text())


def test_a_series_is_its_revision_and_its_patches() -> None:
    listing = "# why\nRevision: 3\n0001-do-it.patch\n0002-more.patch\n"
    contents = {"0001-do-it.patch": text(), "0002-more.patch": text()}
    series = patch_series.parse_series("pkg", "1.0", listing, contents)
    assert series.label == "stack.3"
    assert [patch.name for patch in series.patches] == ["0001-do-it.patch", "0002-more.patch"]


@pytest.mark.parametrize(
    ("listing", "names", "reason"),
    [
        ("0001-do-it.patch\n", ["0001-do-it.patch"], "expected 'Revision: N'"),
        ("Revision: 0\n", [], "expected 'Revision: N'"),
        ("", [], "expected 'Revision: N'"),
        ("Revision: 1\n", ["0001-do-it.patch"], r"not listed: \['0001-do-it.patch'\]"),
        ("Revision: 1\n0001-do-it.patch\n", [], r"not there: \['0001-do-it.patch'\]"),
        ("Revision: 1\n0001-do-it.patch\n0001-do-it.patch\n", ["0001-do-it.patch"], "once"),
        ("Revision: 1\n0002-b.patch\n0001-a.patch\n", ["0001-a.patch", "0002-b.patch"], "order"),
    ],
)
def test_a_series_that_does_not_say_what_is_there_is_refused(
    listing: str, names: list[str], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        patch_series.parse_series("pkg", "1.0", listing, {name: text() for name in names})


def series(changes: Mapping[str, str | None] | None = None) -> patch_series.Series:
    return patch_series.Series("pkg", "1.0", 1, (patch_series.parse_patch(NAME, text(changes)),))


@given(st.integers(-400, 400))
def test_a_patch_is_carried_until_its_review_date(days: int) -> None:
    today = date(2027, 5, 21) + timedelta(days=days)
    found = patch_series.check(series(), today, {"tests/patches/test_it.py"})
    assert bool(found) == (days > 0)
    assert all("Review-By 2027-05-21 has passed" in problem for problem in found)


@pytest.mark.parametrize(
    ("release", "dropped"), [("0.9", True), ("1.0", True), ("1.0.1", False), ("1.10", False)]
)
def test_a_patch_that_the_pinned_release_has_is_to_be_dropped(release: str, dropped: bool) -> None:
    one = series({"Applied-Upstream": release})
    found = patch_series.check(one, date(2027, 1, 1), {"tests/patches/test_it.py"})
    assert [f"since {release}" in problem and "drop the patch" in problem for problem in found] == [
        True
    ] * dropped


def test_a_patch_for_another_version_is_told() -> None:
    found = patch_series.check(
        series({"Applies-To": "pkg==2.0"}), date(2027, 1, 1), {"tests/patches/test_it.py"}
    )
    assert len(found) == 1
    assert "Applies-To is 'pkg==2.0', expected 'pkg==1.0'" in found[0]


def test_a_patch_without_its_test_is_told() -> None:
    found = patch_series.check(series(), date(2027, 1, 1), set())
    assert len(found) == 1
    assert "its test tests/patches/test_it.py does not exist" in found[0]


def test_a_version_without_patches_has_no_series(tmp_path: Path) -> None:
    assert patch_series.load("pkg", "1.0", tmp_path) is None


def test_every_patch_of_this_repository_can_be_read_and_has_its_test() -> None:
    found = patch_series.load_all()
    folders = sorted(file.parent for file in patch_series.PATCHES.glob("*/*/series"))
    assert [(one.package, one.version) for one in found] == [(at.parent.name, at.name) for at in folders]
    for one in found:
        assert patch_series.check(one, date(2026, 11, 21), patch_series.existing_tests()) == []


def test_hunks_have_one_line_of_context() -> None:
    for one in patch_series.load_all():
        for patch in one.patches:
            leading = 0
            for line in patch.diff.splitlines():
                if line.startswith("@@"):
                    leading = 0
                elif line.startswith(" "):
                    leading += 1
                    assert leading <= 2, f"{patch.name}: more than one line of context on a side"
                elif line.startswith(("+", "-")):
                    leading = 0


def test_the_command_lists_the_patches(capsys: pytest.CaptureFixture[str]) -> None:
    assert patch_series.main([]) == 0
    assert "openrlhf" in capsys.readouterr().out
