"""The messages of OpenRLHF's parser, which each command that plans a run shows."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.cli import run_options
from rlhf_stack.cli.commands import submit
from rlhf_stack.cli.main import main
from rlhf_stack.openrlhf import command_line
from rlhf_stack.openrlhf.command_line import Parsed
from rlhf_stack.planning import uniform_machines
from rlhf_stack.recovery.job import Ended

from tests.unit.openrlhf_arguments import sections

NOTE = "[Warning] Set --rollout_max_tokens_per_gpu to --train_max_tokens_per_gpu."
SIZES = "layers:2,hidden:64,intermediate:128,heads:4,vocabulary:1000"
MODELS = [word for role in ("actor", "critic", "reward") for word in ("--model", f"{role}-model={SIZES}")]
RUN = ["--", "python", "-m", "openrlhf.cli.train_ppo_ray"]
TUNE = ["tune", "--nodes", "8", "--gpu-memory", "80", *MODELS]


@pytest.fixture(autouse=True)
def _parser(monkeypatch: pytest.MonkeyPatch) -> None:
    values = sections(ds__adam_offload=False)
    values.ckpt = SimpleNamespace(path="/no", save_steps=-1, load_enable=False, disable_ds=False)
    values.ds.use_universal_ckpt = False
    values.train.enable_ema = False
    monkeypatch.setattr(command_line, "parse", lambda *_: Parsed("0.11.2", values, (NOTE,)))
    monkeypatch.setattr(run_options, "ray_machines", lambda *_: uniform_machines(8, 8, 80, 64, 2000))


def test_tune_prints_them_next_to_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    """`eval "$(rlhf-stack tune --apply ...)"` must not run them."""
    for option in ([], ["--apply"]):
        assert main([*TUNE, *option, *RUN]) == 0
        printed = capsys.readouterr()
        assert printed.err == f"OpenRLHF: {NOTE}\n"
        assert NOTE not in printed.out


def test_tune_has_them_in_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TUNE, "--json", *RUN]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["said"] == [NOTE]
    assert printed.err == ""


@pytest.mark.usefixtures("messages_as_before")
def test_submit_warns_before_the_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(*_: Any) -> Ended:
        print("job")
        return Ended("j", "SUCCEEDED", 0)

    monkeypatch.setattr(submit, "_once", once)
    assert main(["submit", *MODELS, *RUN]) == 0
    printed = capsys.readouterr()
    assert printed.err == f"rlhf-stack: warning: OpenRLHF: {NOTE}\n"
    assert printed.out == "job\n"
