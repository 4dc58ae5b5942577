"""The files of a series without one of its patches."""

from pathlib import Path

import pytest

from scripts.errors import UserError
from scripts.patches import leave_out
from tests.unit.scripts.patches.test_apply import DIFF, ORIGINAL, make_wheel, series

SECOND = "--- a/pkg/x.py\n+++ b/pkg/x.py\n@@ -2,3 +2,3 @@\n two\n-THREE\n+drei\n four\n"
APART = "--- a/pkg/x.py\n+++ b/pkg/x.py\n@@ -5,2 +5,2 @@\n five\n-six\n+SIX\n"


@pytest.mark.parametrize("prefix", ["", "pkg-1.0.data/purelib/"])
def test_only_the_patch_that_is_left_out_is_missing(tmp_path: Path, prefix: str) -> None:
    one = series(DIFF, APART)
    released = leave_out.files_to_patch(make_wheel(tmp_path, prefix), one)
    texts = [
        {name: file.content.decode() for name, file in leave_out.without(patch, one, released).items()}
        for patch in one.patches
    ]
    assert texts == [
        {"pkg/x.py": ORIGINAL.replace("six", "SIX")},
        {"pkg/x.py": ORIGINAL.replace("three", "THREE")},
    ]


def test_a_patch_that_another_one_needs_cannot_be_left_out(tmp_path: Path) -> None:
    one = series(DIFF, SECOND)
    released = leave_out.files_to_patch(make_wheel(tmp_path), one)
    with pytest.raises(UserError, match=r"0002-change.patch: the hunk at pkg/x.py line 2 does not apply"):
        leave_out.without(one.patches[0], one, released)
