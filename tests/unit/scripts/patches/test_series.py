"""Patch files: their headers, their series, and what is refused."""

from collections.abc import Mapping
from datetime import date
from pathlib import Path

import pytest

from scripts.errors import UserError
from scripts.patches.series import load_all, load_series, parse_patch, parse_series

HEADER = {
    "Description": "Do it",
    "Kind": "fix",
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
    patch = parse_patch(NAME, text({"Description": "Do it\n for a reason\n and another"}))
    assert patch.title == "Do it"
    assert patch.header["Description"] == "Do it\nfor a reason\nand another"
    assert patch.files == ("pkg/x.py",)
    assert patch.diff == DIFF
    assert patch.review_by == date(2027, 5, 21)


@pytest.mark.parametrize("field", list(HEADER))
def test_a_header_that_lacks_a_field_is_refused(field: str) -> None:
    with pytest.raises(UserError, match=f"{NAME}: the header lacks {field}"):
        parse_patch(NAME, text({field: None}))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (text({"Autor": "me"}), r"0001-do-it.patch:12: unknown field 'Autor'"),
        ("Bug: 1\n" + text(), "field Bug appears twice"),
        (text({"Kind": "useful"}), "Kind: 'useful': expected fix, feature, support"),
        (text({"Review-By": "soon"}), "Review-By: 'soon': expected a date"),
        (text({"Applied-Upstream": "main"}), "Applied-Upstream: 'main': expected no, or a release"),
        (text(diff=""), "changes no file"),
        ("Description: x\n", "a line '---' and a diff"),
    ],
)
def test_an_invalid_patch_is_refused_with_the_reason(wrong: str, error: str) -> None:
    with pytest.raises(UserError, match=error):
        parse_patch(NAME, wrong)


@pytest.mark.parametrize("name", ["1-x.patch", "0001_x.patch", "0001-X.patch", "0001-x.diff", "0001-.patch"])
def test_a_patch_has_a_number_and_a_name(name: str) -> None:
    with pytest.raises(UserError, match="expected a name such as"):
        parse_patch(name, text())


def test_a_series_is_its_revision_and_its_patches() -> None:
    listing = "# why\nRevision: 3\n0001-do-it.patch\n0002-more.patch\n"
    contents = {"0001-do-it.patch": text(), "0002-more.patch": text()}
    series = parse_series("pkg", "1.0", listing, contents)
    assert series.label == "stack.3"
    assert [patch.name for patch in series.patches] == ["0001-do-it.patch", "0002-more.patch"]


@pytest.mark.parametrize(
    ("listing", "names", "reason"),
    [
        ("0001-do-it.patch\n", ["0001-do-it.patch"], "expected 'Revision: N'"),
        ("Revision: 0\n", [], "expected 'Revision: N'"),
        ("", [], "expected 'Revision: N'"),
        ("Revision: 1\n", ["0001-do-it.patch"], r"not listed: \['0001-do-it.patch'\]"),
        ("Revision: 1\n0001-do-it.patch\n", [], r"missing: \['0001-do-it.patch'\]"),
        ("Revision: 1\n0001-do-it.patch\n0001-do-it.patch\n", ["0001-do-it.patch"], "once"),
        ("Revision: 1\n0002-b.patch\n0001-a.patch\n", ["0001-a.patch", "0002-b.patch"], "order"),
    ],
)
def test_a_series_that_disagrees_with_its_directory_is_refused(
    listing: str, names: list[str], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        parse_series("pkg", "1.0", listing, {name: text() for name in names})


def test_a_version_without_patches_has_no_series(tmp_path: Path) -> None:
    assert load_series("pkg", "1.0", tmp_path) is None


def test_hunks_have_one_line_of_context() -> None:
    for one in load_all():
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
