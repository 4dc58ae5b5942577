"""The catalogue's pages follow from the records and the sources, and anything else on them is reported."""

import datetime
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest

from scripts.errors import UserError
from scripts.images.source import source_digest
from scripts.matrix.load import Cell, expand, load, stand_ins
from scripts.patches.series import series_of
from scripts.release import catalogue, facts, fault_cases, measure, render
from scripts.release.facts import Facts, Layer, Measured
from scripts.testing import records
from scripts.testing.records import Subject, required
from tests.unit.git_command import git

CELLS = expand(load())
CELL = next(cell for cell in CELLS if cell.is_default)
README = f"before\n{render.BEGIN}\nold\n{render.END}\nafter\n"
SHARED, OWN = Layer("sha256:a", 700_000_000), Layer("sha256:b", 300_000_000)
IMAGE = "sha256:" + "1" * 64
SERIES = series_of(CELL)[0]
PATCH = SERIES.patches[0]
PATCH_NAME = f"{SERIES.package}/{PATCH.name}"
JUNIT = """<testsuites><testsuite>
<testcase classname="a" name="b"/><testcase classname="a" name="c"/>
<testcase classname="a" name="d"><skipped message="no GPU">x</skipped></testcase>
</testsuite></testsuites>"""
FAILED = JUNIT.replace('name="b"/>', 'name="b"><failure message="no">x</failure></testcase>')


def measured(cell: Cell) -> Measured:
    """The measurements of an image that is of this tree."""
    return Measured(
        cell=cell.id,
        image=IMAGE,
        inputs="d" * 64,
        source=source_digest(cell),
        revision="a" * 40,
        when=records.now(),
        stand_in="",
        size=1_000_000_000,
        layers=(SHARED, OWN),
        versions=cell.versions,
        patches=(PATCH_NAME,),
        architectures={"torch": ("sm_80", "sm_90")},
    )


class Store:
    """The local and the committed records of cells, with the catalogue's files, in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.local, self.root = folder, folder / "local", folder / "committed"

    def run(self, on: Measured, suite: str, junit: str = JUNIT) -> records.Record:
        """Record a run of a suite."""
        file = self.folder / "junit.xml"
        file.write_text(junit, encoding="utf-8")
        with records.recording(
            Subject(on.cell, on.image, on.inputs), suite, (self.local, self.root)
        ) as tally:
            tally.add(file, 0)
            if suite == "patches":
                tally.proofs.append(
                    records.Proof("f", "x", "exit 1: ImportError: no", "exit 0: ok", SERIES.id_of(PATCH))
                )
        return records.read(on.cell, on.inputs, (self.local,))[-1]

    def keep(self, on: Measured) -> dict[str, Facts]:
        """Add a measurement and the local records; return the facts."""
        facts.keep(on, self.root, self.local)
        return self.facts()

    def facts(self) -> dict[str, Facts]:
        return facts.load(CELLS, self.root)

    def file(self, on: Measured, pattern: str) -> Path:
        """Return the only committed file that matches."""
        [file] = records.folder_of(on.cell, on.inputs, self.root).glob(pattern)
        return file


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store without records."""
    return Store(tmp_path)


def with_results(store: Store, cell: Cell = CELL) -> dict[str, Facts]:
    """Return the facts of a cell's image of this tree, on which the suite image ran."""
    store.run(measured(cell), "image")
    return store.keep(measured(cell))


def later(**changes: Any) -> Measured:
    """The measurements of a minute later, with ``changes``."""
    now = measured(CELL)
    return msgspec.structs.replace(now, when=now.when + datetime.timedelta(minutes=1), **changes)


def test_table_has_a_row_for_each_published_cell_gpus_first(store: Store) -> None:
    """A user finds GPU, driver and tag, and whether the image was built, tested and run on a GPU."""
    for cell in CELLS:
        if not cell.sources:
            known = with_results(store, cell)
    table = render.fill(README, (*CELLS, *stand_ins(load())), known).partition(render.BEGIN)[2]
    lines = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(lines) == len(CELLS)
    assert "cuda13.0" in lines[0]
    for cell in CELLS:
        (line,) = (line for line in lines if f"`{cell.id}`" in line)
        gpus, driver = line.split(" | ")[:2]
        for architecture in cell.accelerator.gpus.architectures if cell.accelerator.gpus else ["none"]:
            assert architecture in gpus
        assert (cell.accelerator.driver.oldest if cell.accelerator.driver else "none") in driver
        assert line.count(" | ") == len(render.COLUMNS) - 1
        assert ("built here, 2 tests passed on a CPU; not run: layers, patches" in line) == (not cell.sources)
        assert ("this build never ran on a GPU" in line) == (cell.accelerator.kind == "cuda")
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


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_without_an_image_the_page_says_only_of_a_recipe_what_was_shown(cell: Cell) -> None:
    text = render.page([cell], {})
    assert (f"\nShown: {cell.tested.verified}.\n" in text) == bool(cell.sources)
    assert ("by documented rules" in text) == (cell.accelerator.kind == "rocm")


def test_the_page_has_the_facts_of_each_image(store: Store) -> None:
    store.run(measured(CELL), "patches")
    known = with_results(store)
    text = render.page([CELL], known)
    for expected in (
        IMAGE,
        "torch: sm_80, sm_90",
        f"`{PATCH_NAME}` | {PATCH.header['Kind']} | fails (ImportError) | passes",
        "| image | passed | 2 | 0 | 1 |",
        "| image | no GPU | 1 |",
        "of this checkout",
    ):
        assert expected in text
    assert "\nVerified: " not in text  # suites are absent
    absent = [suite for suite in required(CELL) if suite not in ("image", "patches")]
    assert f"Not run on an image of these inputs: {', '.join(absent)}." in text
    text = render.page([CELL], store.keep(later(stand_in="torch")))
    assert "**A stand-in**" in text


@pytest.mark.parametrize("junit", [JUNIT, FAILED], ids=["passed", "failed"])
def test_a_cell_is_verified_if_every_required_suite_passed(junit: str, store: Store) -> None:
    for suite in required(CELL):
        store.run(measured(CELL), suite, junit)
    text = render.page([CELL], store.keep(measured(CELL)))
    assert (f"\nVerified: {CELL.tested.verified}." in text) == (junit == JUNIT)


def test_a_cell_without_records_has_no_figure() -> None:
    text = render.page(CELLS, {})
    count = sum(not cell.sources for cell in CELLS)
    assert text.count("\nNot verified: there are no records of an image.\n") == count
    assert text.count("\nRecipe only, never built.\n") == len(CELLS) - count
    assert "\nVerified: " not in text


def test_failures_stay_visible(store: Store) -> None:
    """In the README while they are the last result, in the catalogue also after the suite has passed."""
    store.run(measured(CELL), "image", FAILED)
    known = store.keep(measured(CELL))
    assert render.status(CELL, known).startswith("built here, failed: image; not run: ")
    known = with_results(store)
    assert render.status(CELL, known).startswith("built here, 2 tests passed on a CPU")
    [line] = (line for line in render.page([CELL], known).splitlines() if line.startswith("| image | passed"))
    assert "| 2, 1 failed |" in line


def test_facts_of_other_sources_are_shown_as_not_verified_yet(store: Store) -> None:
    """The page says by itself that work went on; lint stays green."""
    before = msgspec.structs.replace(measured(CELL), source="e" * 64)
    store.run(before, "patches")
    store.run(before, "image")
    known = store.keep(before)
    tests = "with the inputs before, `dddddddddddd`: 4 tests passed on a CPU; not run: layers, "
    assert render.status(CELL, known).startswith(f"not verified yet: its sources changed; {tests}")
    text = render.page([CELL], known)
    assert f"This checkout has the sources `{source_digest(CELL)[:12]}`: not verified yet." in text
    assert "**not verified yet**" in text
    assert "sources `eeeeeeeeeeee`" in text
    assert "\nVerified: " not in text
    assert "fails (ImportError)" not in text


def test_the_same_inputs_from_other_sources_are_verified_again(store: Store) -> None:
    """A measurement records that these sources give the inputs on which the tests passed."""
    before = msgspec.structs.replace(measured(CELL), source="e" * 64)
    store.run(before, "image")
    assert not facts.is_current(CELL, store.keep(before)[CELL.id])
    known = store.keep(later())
    assert facts.is_current(CELL, known[CELL.id])
    assert known[CELL.id].passed == 2


def test_an_untested_image_does_not_replace_a_tested_one(store: Store) -> None:
    """Its own records do."""
    known = with_results(store)
    again = later(inputs="e" * 64, image="sha256:2")
    assert store.keep(again) == known
    store.run(again, "image", FAILED)
    assert store.keep(again)[CELL.id].suites["image"].outcome == "failed"


def test_measuring_again_adds_nothing(store: Store) -> None:
    with_results(store)
    files = sorted(store.root.rglob("*"))
    store.keep(later())
    assert sorted(store.root.rglob("*")) == files


def test_records_with_altered_evidence_are_not_kept(store: Store) -> None:
    record = store.run(measured(CELL), "image")
    evidence = records.folder_of(CELL.id, record.inputs, store.local) / "evidence" / record.evidence[0]
    evidence.write_text(FAILED, encoding="utf-8")
    with pytest.raises(UserError, match=r"was changed: restore it, or remove .* and run its suites again"):
        store.keep(measured(CELL))
    assert store.facts() == {}


def test_evidence_that_was_altered_after_the_catalogue_was_written_is_reported(store: Store) -> None:
    """On the machine that has it; a clone has the records alone."""
    known = with_results(store)
    [evidence] = (store.local / CELL.id).glob("*/evidence/*")
    assert catalogue.contradicted(known, (store.local, store.root)) == []
    evidence.write_text(FAILED, encoding="utf-8")
    [reason] = catalogue.contradicted(known, (store.local, store.root))
    assert reason.endswith(f"{evidence.name} was changed")
    other = Store(store.folder)
    other.local = store.folder / "clone"  # another machine, with records of its own
    assert catalogue.contradicted(known, (other.local, store.root)) == []
    other.run(measured(CELL), "layers")
    assert catalogue.contradicted(known, (other.local, store.root)) == []


def files_of(store: Store, monkeypatch: pytest.MonkeyPatch) -> dict[Path, str]:
    """Write the generated files of the store's facts to it; return them."""
    for module, name, file in (
        (facts, "CATALOGUE", "catalogue.json"),
        (catalogue, "PAGE", "page.md"),
        (catalogue, "README", "README.md"),
        (catalogue, "ROOT", ""),
    ):
        monkeypatch.setattr(module, name, store.folder / file)
    texts = catalogue.texts(CELLS, store.facts(), README)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return texts


@pytest.mark.parametrize(
    ("file", "figure"),
    [
        ("catalogue.json", '"size": 1000000000'),
        ("catalogue.json", '"passed": 2'),
        ("page.md", "1000 MB"),
        ("page.md", "| image | passed | 2 |"),
        ("README.md", "2 tests passed"),
    ],
)
def test_a_figure_edited_by_hand_is_reported(
    file: str, figure: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any of the pages, and writing them again removes it."""
    with_results(store)
    texts = files_of(store, monkeypatch)
    readme = (store.folder / "README.md").read_text(encoding="utf-8")
    assert catalogue.stale(CELLS, store.facts(), readme) == []
    path = store.folder / file
    edited = texts[path].replace(figure, figure.replace("2", "4410").replace("000", "3000"))
    assert edited != texts[path]
    path.write_text(edited, encoding="utf-8")
    readme = (store.folder / "README.md").read_text(encoding="utf-8")
    [reason] = catalogue.stale(CELLS, store.facts(), readme)
    assert reason.startswith(f"{file} does not follow from the records and sources")
    assert catalogue.texts(CELLS, store.facts(), readme) == texts


def test_a_figure_edited_in_its_record_is_an_error(store: Store) -> None:
    with_results(store)
    for pattern, figure in (("image-*.json", '"passed": 2'), ("measured/*.json", '"size": 1000000000')):
        file = store.file(measured(CELL), pattern)
        text = file.read_text(encoding="utf-8")
        assert figure in text
        file.write_text(text.replace(figure, f"{figure}0"), encoding="utf-8")
        with pytest.raises(UserError, match="it was changed"):
            store.facts()
        file.write_text(text, encoding="utf-8")


def test_records_of_another_cell_or_of_other_inputs_are_an_error(store: Store) -> None:
    with_results(store)
    other = next(cell for cell in CELLS if cell is not CELL)
    folder = records.folder_of(CELL.id, measured(CELL).inputs, store.root)
    for target in (store.root / other.id / folder.name, folder.with_name("e" * 12)):
        shutil.copytree(folder, target)
        with pytest.raises(UserError, match="moved"):
            store.facts()
        shutil.rmtree(target)


def test_a_removed_failure_is_an_error(store: Store) -> None:
    store.run(measured(CELL), "image", FAILED)
    with_results(store)
    store.file(measured(CELL), "image-1-*.json").unlink()
    with pytest.raises(UserError, match="attempt 1 of the suite image was removed"):
        store.facts()


def test_a_record_of_another_machine_s_image_of_the_same_inputs_is_shown_with_that_image(
    store: Store,
) -> None:
    store.run(msgspec.structs.replace(measured(CELL), image="sha256:" + "2" * 64), "image")
    known = store.keep(measured(CELL))
    [line] = (line for line in render.page([CELL], known).splitlines() if line.startswith("| image | passed"))
    assert "| `222222222222` |" in line


def test_a_result_that_proves_less_than_it_says_has_reservations(store: Store) -> None:
    """On the page and in the README: other tests, uncommitted changes, fewer tests, undeclared skips."""
    store.run(measured(CELL), "image", re.sub("<skipped.*skipped>", "", JUNIT))
    store.run(measured(CELL), "image", JUNIT.replace("no GPU", "this image has no OpenTelemetry"))
    result = store.keep(measured(CELL))[CELL.id].suites["image"]
    clean = msgspec.structs.replace(result, revision="a" * 40)
    assert render.reservations("image", clean) == ["3 of the same tests passed before"]
    for changes, expected in (
        ({"most": 2}, []),
        ({"most": 2, "tests": "0" * 64}, ["its tests changed since"]),
        ({"most": 2, "revision": f"{'a' * 40}-dirty"}, ["uncommitted changes"]),
        ({"most": 2, "skips": {"no time": 999}}, ["undeclared reason for a skip: no time"]),
    ):
        assert render.reservations("image", msgspec.structs.replace(clean, **changes)) == expected
    known = store.facts()
    assert "3 of the same tests passed before |" in render.page([CELL], known)
    assert "; with reservations: image" in render.status(CELL, known)


def commit(folder: Path, *names: str) -> None:
    """Commit all changes, and new files of these names below ``images/``."""
    for name in names:
        file = folder / "images" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name, encoding="utf-8")
    git(folder, "add", ".")
    git(folder, "commit", "-m", "x")


def test_a_record_that_was_removed_from_the_history_is_reported(tmp_path: Path) -> None:
    """Also the only attempt, which leaves no gap; a record that was restored is no error."""
    git(tmp_path, "init")
    names = [f"records/{name}" for name in ("failed", "restored", "kept", "unstaged")]
    commit(tmp_path, *names, "soaks/a", "certificates/a.sig", "other/a")
    gone = ("records/failed", "records/restored", "soaks/a", "certificates/a.sig", "other/a")
    git(tmp_path, "rm", *(f"images/{name}" for name in gone))
    git(tmp_path, "commit", "-m", "y")
    commit(tmp_path, "records/restored")
    (tmp_path / "images" / "records" / "unstaged").unlink()
    assert [line.split()[0] for line in catalogue.removed(tmp_path)] == [
        "images/certificates/a.sig",
        "images/records/failed",
        "images/records/unstaged",
        "images/soaks/a",
    ]


@pytest.mark.parametrize("merge", [("--no-commit",), ("--strategy=ours",)], ids=["by hand", "one side only"])
def test_a_record_that_a_merge_has_removed_is_reported(merge: tuple[str, ...], tmp_path: Path) -> None:
    """Git's history, unless asked for more, has neither what a merge itself removes nor the side it drops."""
    git(tmp_path, "init", "--initial-branch=main")
    commit(tmp_path, "other")
    git(tmp_path, "checkout", "-b", "side")
    commit(tmp_path, "records/failed", "records/kept")
    git(tmp_path, "checkout", "main")
    commit(tmp_path, "another")
    git(tmp_path, "merge", *merge, "side")
    (tmp_path / "images" / "records" / "failed").unlink(missing_ok=True)
    commit(tmp_path, "records/kept")
    assert [line.split()[0] for line in catalogue.removed(tmp_path)] == ["images/records/failed"]


@pytest.mark.parametrize("removed", [catalogue.removed, fault_cases.removed])
def test_a_history_that_git_cannot_read_is_an_error(
    removed: Callable[[Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(UserError, match="git cannot list what was removed: fatal: not a git repository"):
        removed(tmp_path)


def test_the_check_goes_on_without_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = MagicMock(side_effect=UserError("git cannot list what was removed: why"))
    monkeypatch.setattr(catalogue, "removed", fail)
    monkeypatch.setattr(catalogue, "stale", lambda *_: ["a page is stale"])
    assert catalogue.check(offline=True) == ["a page is stale", "git cannot list what was removed: why"]


def test_a_record_of_other_inputs_gives_no_figure(store: Store) -> None:
    store.run(msgspec.structs.replace(measured(CELL), inputs="e" * 64), "image")
    assert store.keep(measured(CELL))[CELL.id].suites == {}


def test_another_build_of_the_same_is_no_difference() -> None:
    """Only its id, its commit and a few bytes of compiled Python differ."""
    first = measured(CELL)
    known = Facts(**msgspec.structs.asdict(first), proofs={}, suites={})
    again = msgspec.structs.replace(first, image="sha256:2", revision="b", size=first.size + 1000)
    assert catalogue.differences(known, again) == []
    other = msgspec.structs.replace(first, size=2 * first.size, architectures={})
    [reason] = catalogue.differences(known, other)
    assert "other architectures, size (1000 MB, now 2000 MB)" in reason
    [reason] = catalogue.differences(known, msgspec.structs.replace(first, inputs="e"))
    assert "the facts are of other inputs" in reason


def test_an_image_that_cannot_be_measured_is_an_error_and_one_of_other_inputs_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], store: Store
) -> None:
    """The other cells are measured."""
    found: list[Measured | UserError] = [
        measured(CELLS[0]),
        UserError("ray 2.55.0 cannot be downloaded: no network"),
        measure.OtherInputsError("y was built from other inputs than this checkout's: rebuild it"),
        measured(CELLS[3]),
    ]
    outcomes = dict(zip((cell.id for cell in CELLS), found, strict=False))

    def measure_one(_: Any, cell: Cell, __: Any) -> Measured:
        outcome = outcomes[cell.id]
        if isinstance(outcome, Measured):
            return outcome
        raise outcome

    monkeypatch.setattr(catalogue, "measure", measure_one)
    monkeypatch.setattr(catalogue, "connect", lambda: None)
    monkeypatch.setattr(catalogue, "images", lambda *_: outcomes)
    for name in ("stale", "removed", "contradicted"):
        monkeypatch.setattr(catalogue, name, lambda *_: [])
    monkeypatch.setattr(fault_cases, "removed", list)
    monkeypatch.setattr(facts, "load", lambda _: outcomes)
    monkeypatch.setattr(catalogue, "differences", lambda *_: ["a difference"])
    reason = "ray 2.55.0 cannot be downloaded: no network"
    assert catalogue.check(offline=False) == [reason, "a difference", "a difference"]
    assert (
        "skipped: y was built from other inputs than this checkout's: rebuild it" in capsys.readouterr().out
    )
    kept: list[Measured] = []
    monkeypatch.setattr(facts, "keep", kept.append)
    monkeypatch.setattr(catalogue, "texts", lambda *_: {})
    assert catalogue.write(offline=False) == [reason]
    assert [one.cell for one in kept] == [CELLS[0].id, CELLS[3].id]


def test_layers_are_those_with_a_size() -> None:
    """An image's history has steps without a layer, and a layer in which nothing changed."""
    history = [{"Size": 0}, {"Size": 300}, {"Size": 0}, {"Size": 700}]
    found = measure.layers_of(["sha256:a", measure.EMPTY, "sha256:b"], history)
    assert found == (Layer("sha256:a", 700), Layer("sha256:b", 300))
    assert measure.layers_of(["sha256:a"], history) == ()


def test_shared_bytes_are_those_of_layers_that_another_published_cell_has() -> None:
    one = Facts(**msgspec.structs.asdict(measured(CELL)), proofs={}, suites={})
    other = msgspec.structs.replace(one, layers=(SHARED,))
    assert facts.shared("one", {"one": one}) == 0
    assert facts.shared("one", {"one": one, "other": other}) == SHARED.size
    stand_in = msgspec.structs.replace(other, stand_in="torch")
    assert facts.shared("one", {"one": one, "other": stand_in}) == 0
    assert facts.shared("one", {"one": msgspec.structs.replace(one, layers=()), "other": other}) is None
