"""The line of `rlhf-stack --version`."""

from pathlib import Path

import msgspec
import pytest
from rlhf_stack.cli.main import main
from rlhf_stack.config import env_vars, image

from scripts.matrix.load import find, load
from scripts.matrix.model import STAND_IN


def test_it_names_release_cell_and_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cell.json").write_text('{"release": "2026.11", "id": "ray2-cpu"}')
    monkeypatch.setenv(env_vars.INPUTS, "0123456789abcdef" * 4)
    line = image.description(tmp_path)
    assert line.startswith("rlhf-stack 2026.11, cell ray2-cpu, inputs sha256:0123456789ab (rlhf_stack ")
    monkeypatch.delenv(env_vars.INPUTS)
    assert "inputs unknown, RLHF_STACK_INPUTS is not set (" in image.description(tmp_path)


@pytest.mark.parametrize("content", [None, "", "[]", "{}"])
def test_outside_of_an_image_it_is_that_of_the_package(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "cell.json").write_text(content)
    assert image.description(tmp_path).endswith("not in an image of the stack")


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"stand_in": null, "env": [{}]}'])
def test_other_images_have_no_defaults_of_a_stand_in(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "cell.json").write_text(content)
    assert image.stand_in_defaults(tmp_path) == image.env_defaults(tmp_path) == {}


@pytest.mark.parametrize("stand_in", ["", STAND_IN])
def test_the_defaults_of_an_image_include_those_of_its_accelerator(tmp_path: Path, stand_in: str) -> None:
    (tmp_path / "cell.json").write_bytes(
        msgspec.json.encode(find(load(), f"ray2.55.0-vllm0.29.0-rocm7{stand_in}"))
    )
    found = image.env_defaults(tmp_path)
    assert found[env_vars.SYNC_BACKEND] == "gloo"
    assert image.stand_in_defaults(tmp_path) == (found if stand_in else {})
    assert image.profile_values("nccl", tmp_path)[env_vars.SYNC_BACKEND] == "nccl"
    assert image.profile_values("", tmp_path) == image.profile_values("other", tmp_path) == {}


def test_the_option_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{image.description()}\n"
