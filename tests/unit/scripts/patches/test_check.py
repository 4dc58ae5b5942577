"""scripts.patches.check: lint tells of a patch that no longer fits the pinned package, and what to do."""

from pathlib import Path

import pytest

from scripts.errors import UserError
from scripts.images import wheels
from scripts.patches import check, patch_series
from tests.unit.scripts.images.test_wheels import DIFF, make_wheel, series

SECOND = "--- a/pkg/x.py\n+++ b/pkg/x.py\n@@ -2,3 +2,3 @@\n two\n-THREE\n+drei\n four\n"


@pytest.mark.parametrize("prefix", ["", "pkg-1.0.data/purelib/"])
def test_patches_are_tried_one_upon_the_other(tmp_path: Path, prefix: str) -> None:
    check.check(make_wheel(tmp_path, prefix), series(DIFF, SECOND))


def test_a_hunk_that_no_longer_fits_is_told_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"patches/pkg/1.0/0002-change.patch: the hunk at pkg/x.py line 2 does not fit .* make it fit",
    ):
        check.check(make_wheel(tmp_path), series(DIFF, DIFF))


def test_the_command_fails_for_one_and_says_what_it_could_not_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel, found = make_wheel(tmp_path), {("pkg", "1.0"): (series(DIFF), ["0" * 64])}
    monkeypatch.setattr(check, "locked", lambda: found)
    monkeypatch.setattr(wheels, "fetch_pristine", lambda *_: wheel)
    assert (check.main(), capsys.readouterr().err) == (0, "")
    found["pkg", "1.0"] = (series(SECOND), ["0" * 64])
    assert check.main() == 1
    assert "does not fit" in capsys.readouterr().err

    def unreachable(*_: object) -> Path:
        raise UserError("the package index cannot be reached")

    monkeypatch.setattr(wheels, "fetch_pristine", unreachable)
    assert check.main() == 0
    assert "not checked whether the patches of pkg 1.0 fit: the package index" in capsys.readouterr().err


def test_every_series_is_that_of_a_pinned_package() -> None:
    """One that no cell pins any more would never be checked again."""
    known = {(one.package, one.version) for one in patch_series.load_all()}
    assert known == set(check.locked())
