"""The catalogue's pages follow from the facts, and a stale page is reported."""

import struct
from pathlib import Path

import msgspec
import pytest

from scripts.errors import UserError
from scripts.matrix.load import Cell, expand, load, stand_ins
from scripts.patches.series import series_of
from scripts.release import catalogue, facts, image_probe, measure, render
from scripts.release.facts import Facts, Layer, SuiteResult
from scripts.testing.proofs import Proved
from scripts.testing.records import required

CELLS = expand(load())
CELL = next(cell for cell in CELLS if cell.is_default)
README = f"before\n{render.BEGIN}\nold\n{render.END}\nafter\n"
SHARED, OWN = Layer("sha256:a", 700_000_000), Layer("sha256:b", 300_000_000)


def measured(cell: Cell) -> Facts:
    """The facts of an image that is of this tree."""
    return Facts(
        image="sha256:" + "1" * 64,
        revision="a" * 40,
        stand_in="",
        size=1_000_000_000,
        layers=(SHARED, OWN),
        versions=cell.versions,
        lock=facts.lock_digest(cell),
        series=facts.series_digest(series_of(cell)),
        patches=("openrlhf/0001-x.patch",),
        proofs={"openrlhf/0001-x.patch": Proved("fails (ImportError)", "passes")},
        architectures={"torch": ("sm_80", "sm_90")},
        suites={"image": SuiteResult("passed", 72, 0, 2, 130.0)},
    )


def test_table_has_a_row_for_each_published_cell_gpus_first() -> None:
    """A user finds GPU, driver and tag, and whether the image was built, tested and run on a GPU."""
    tests = {cell.id: measured(cell) for cell in CELLS if not cell.sources}
    table = render.fill(README, (*CELLS, *stand_ins(load())), tests).partition(render.BEGIN)[2]
    lines = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(lines) == len(CELLS)
    assert "cuda13.0" in lines[0]
    for cell in CELLS:
        (line,) = (line for line in lines if f"`{cell.id}`" in line)
        assert line.startswith(f"| {cell.accelerator.gpus} | {cell.accelerator.driver} | ")
        assert line.count(" | ") == len(render.COLUMNS) - 1
        assert ("built here, 72 tests passed on a CPU" in line) == (not cell.sources)
        assert ("never run on a GPU" in line) == (cell.accelerator.kind == "cuda")
        assert (render.RECIPE_ONLY in line) == bool(cell.sources)
        assert ("(default)" in line) == cell.is_default


def test_filling_twice_changes_nothing_and_keeps_the_rest() -> None:
    """The text around the markers is a person's."""
    once = render.fill(README, CELLS, {})
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "old" not in once
    assert render.fill(once, CELLS, {}) == once


def test_missing_markers_are_an_error() -> None:
    with pytest.raises(UserError, match=r"README\.md: expected the lines"):
        render.fill("no markers", CELLS, {})


def test_the_page_has_the_facts_of_each_image() -> None:
    known = measured(CELL)
    failed = msgspec.structs.replace(
        known, suites={"layers": SuiteResult("failed", 9, 1, 0, 5.0)}, stand_in="torch"
    )
    text = render.page([CELL], {CELL.id: known})
    for expected in (
        known.image,
        "torch: sm_80, sm_90",
        "fails (ImportError) | passes",
        "passed | 72 | 0 | 2 | 130",
    ):
        assert expected in text
    assert f"Not run on this image: {', '.join(s for s in required(CELL) if s != 'image')}." in text
    assert f"\nVerified: {CELL.tested.verified}." in text
    text = render.page([CELL], {CELL.id: failed})
    assert "| layers | failed | 9 | 1 | 0 | 5 |" in text
    assert "**A stand-in**" in text
    text = render.page(CELLS, {})
    assert text.count("\nNever built.\n") == sum(not cell.sources for cell in CELLS)
    assert text.count("\nRecipe only, never built.\n") == sum(bool(cell.sources) for cell in CELLS)
    assert "\nVerified: " not in text


def test_a_failed_suite_is_in_the_readme() -> None:
    known = msgspec.structs.replace(measured(CELL), suites={"layers": SuiteResult("failed", 9, 1, 0, 5.0)})
    assert render.status(CELL, {CELL.id: known}) == "built here, failed: layers"
    known = msgspec.structs.replace(known, suites={})
    assert render.status(CELL, {CELL.id: known}) == "built here, not tested"


def test_facts_of_this_tree_are_not_outdated() -> None:
    assert facts.outdated(CELL, measured(CELL)) is None


@pytest.mark.parametrize(
    ("change", "what"),
    [({"lock": "0"}, "lock"), ({"series": "0"}, "patches"), ({"versions": {"ray": "1"}}, "versions")],
)
def test_facts_of_another_tree_are_kept_but_not_shown(change: dict[str, object], what: str) -> None:
    known = {CELL.id: msgspec.structs.replace(measured(CELL), **change)}
    assert facts.outdated(CELL, known[CELL.id]) == what
    assert facts.current(CELLS, known) == {}
    assert render.status(CELL, known) == render.OUTDATED
    text = render.page([CELL], known)
    assert (
        "\nNot built since its inputs changed. An earlier image, of commit aaaaaaaaaaaa, passed 72 tests.\n"
        in text
    )
    assert known[CELL.id].image not in text
    assert facts.dump(known) in catalogue.texts(CELLS, known, README).values()


def test_a_less_tested_image_does_not_replace_a_better_tested_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Otherwise a rebuild would remove the tests from the catalogue."""
    passed, failed = SuiteResult("passed", 9, 0, 0, 5.0), SuiteResult("failed", 9, 1, 0, 5.0)
    tested = msgspec.structs.replace(measured(CELL), suites={"image": passed, "cluster": passed})
    again = msgspec.structs.replace(tested, image="sha256:" + "2" * 64)
    less = msgspec.structs.replace(again, suites={"image": passed, "registry": passed})
    broken = msgspec.structs.replace(again, suites={"image": passed, "cluster": failed})
    assert catalogue.best_tested(CELLS, {CELL.id: tested}, {CELL.id: less}) == {CELL.id: tested}
    assert "on which cluster passed" in capsys.readouterr().out
    assert catalogue.best_tested(CELLS, {CELL.id: tested}, {CELL.id: again}) == {CELL.id: again}
    assert catalogue.best_tested(CELLS, {CELL.id: tested}, {CELL.id: broken}) == {CELL.id: broken}
    assert catalogue.best_tested(CELLS, {}, {CELL.id: less}) == {CELL.id: less}
    outdated = msgspec.structs.replace(tested, lock="0")
    assert catalogue.best_tested(CELLS, {CELL.id: outdated}, {CELL.id: less}) == {CELL.id: less}


def test_a_cell_that_no_longer_exists_is_reported() -> None:
    [reason] = catalogue.stale(CELLS, {"gone": measured(CELL)}, README)
    assert reason == "gone is no longer a cell: run python -m scripts catalogue --offline"


def test_a_file_edited_by_hand_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, file in (
        (facts, "CATALOGUE", "catalogue.json"),
        (catalogue, "PAGE", "page.md"),
        (catalogue, "README", "README.md"),
        (catalogue, "ROOT", ""),
    ):
        monkeypatch.setattr(module, name, tmp_path / file)
    known = {CELL.id: measured(CELL)}
    for path, text in catalogue.texts(CELLS, known, README).items():
        path.write_text(text, encoding="utf-8")
    readme = catalogue.README.read_text(encoding="utf-8")
    assert facts.load(facts.CATALOGUE) == known
    assert catalogue.stale(CELLS, known, readme) == []
    with catalogue.PAGE.open("a", encoding="utf-8") as page:
        page.write("by hand\n")
    assert catalogue.stale(CELLS, known, readme) == [
        "page.md is stale: run python -m scripts catalogue --offline"
    ]


def test_a_damaged_catalogue_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "catalogue.json"
    assert facts.load(file) == {}
    file.write_text('{"a": 1}', encoding="utf-8")
    with pytest.raises(
        UserError, match=r"catalogue\.json: .*; it is written by `python -m scripts catalogue`"
    ):
        facts.load(file)


def test_another_build_of_the_same_is_no_difference() -> None:
    """Only its id, its commit and a few bytes of compiled Python differ."""
    known = measured(CELL)
    again = msgspec.structs.replace(known, image="sha256:2", revision="b", size=known.size + 1000, suites={})
    assert catalogue.differences(CELL, known, again) == []
    other = msgspec.structs.replace(known, size=2 * known.size, architectures={})
    [reason] = catalogue.differences(CELL, known, other)
    assert "other architectures, size (1000 MB, now 2000 MB)" in reason


def test_layers_are_those_with_a_size() -> None:
    """An image's history has steps without a layer, and a layer in which nothing changed."""
    history = [{"Size": 0}, {"Size": 300}, {"Size": 0}, {"Size": 700}]
    found = measure.layers_of(["sha256:a", measure.EMPTY, "sha256:b"], history)
    assert found == (Layer("sha256:a", 700), Layer("sha256:b", 300))
    assert measure.layers_of(["sha256:a"], history) == ()


def test_shared_bytes_are_those_of_layers_that_another_cell_has() -> None:
    one, other = measured(CELL), msgspec.structs.replace(measured(CELL), layers=(SHARED,))
    assert facts.shared("one", {"one": one}) == 0
    assert facts.shared("one", {"one": one, "other": other}) == SHARED.size
    assert facts.shared("one", {"one": msgspec.structs.replace(one, layers=()), "other": other}) is None


def fatbin(*entries: tuple[int, int]) -> bytes:
    """A fat binary as nvcc writes it: kinds and architectures, each with 16 bytes of code."""
    body = b""
    for kind, number in entries:
        header = struct.pack("<HHIQIIHHI", kind, 0x101, 64, 16, 0, 0, 7, 0, number)
        body += header.ljust(64, b"\0") + b"\x7fELF".ljust(16, b"\0")
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_architectures_are_read_from_fat_binaries() -> None:
    content = b"\0" * 40 + fatbin((2, 80), (2, 90)) + b"x" * 9 + fatbin((1, 90)) + fatbin((2, 100))
    assert image_probe.by_number(image_probe.architectures(content)) == [
        "compute_90",
        "sm_80",
        "sm_90",
        "sm_100",
    ]


@pytest.mark.parametrize(
    "content", [b"", b"no code", image_probe.FATBIN, fatbin((2, 80))[:40], fatbin((9, 80))]
)
def test_a_truncated_fat_binary_has_no_architectures(content: bytes) -> None:
    assert image_probe.architectures(content) == set()


def test_targets_of_rocm_are_read_from_their_bundles() -> None:
    content = b"hipv4-amdgcn-amd-amdhsa--gfx90a\0 hipv4-amdgcn-amd-amdhsa--gfx942:xnack+\0"
    assert image_probe.architectures(content) == {"gfx90a", "gfx942"}
