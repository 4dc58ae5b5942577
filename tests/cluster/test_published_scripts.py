"""OpenRLHF's published scripts: planned or refused with the reason, and made small, two steps of training."""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import replacing
from rlhf_stack.accelerator import devices
from rlhf_stack.cli.main import main
from rlhf_stack.compat.deepspeed_ops import CPU_ADAM, FUSED_ADAM, missing_for
from scripts_of_openrlhf import PPO, STEPS, gpus_of_roles, make_files, published, small
from trained import SECTIONS

SECONDS = 600
LLAMA_8B = "layers:32,hidden:4096,intermediate:14336,heads:32,kv_heads:8,vocabulary:128256"
SIZES = {
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (
        "layers:28,hidden:1536,intermediate:8960,heads:12,kv_heads:2,vocabulary:151936"
    ),
    "Qwen/Qwen3-4B-Thinking-2507": (
        "layers:36,hidden:2560,intermediate:9728,heads:32,kv_heads:8,vocabulary:151936"
    ),
    "meta-llama/Meta-Llama-3-70B-Instruct": (
        "layers:80,hidden:8192,intermediate:28672,heads:64,kv_heads:8,vocabulary:128256"
    ),
}
MODELS = (
    "--model.model_name_or_path",
    *("--actor.model_name_or_path", "--reward.model_name_or_path"),
    *("--pretrain", "--reward_pretrain"),
)
FITS, TOO_LARGE, REFUSED = 0, 1, 2


# What the reward functions and agents of OpenRLHF's examples/python import; gem is that of one agent alone.
IMPORTED = (
    "PIL",
    "fastapi",
    "numpy",
    "openai",
    "openrlhf",
    "pylatexenc",
    "sympy",
    "torch",
    "uvicorn",
    "vllm",
)
NOT_INCLUDED = "gem"


def commands(wanted=lambda _: True):
    return [pytest.param(each, id=each.name) for each in published() if wanted(each)]


def operator(command):
    """The operator of DeepSpeed without which an image refuses the command, "" if any image plans it."""
    if any(word.endswith("adam_offload") for word in command.words):
        return CPU_ADAM
    sleeps = "--ds.enable_sleep" in command.words and "--ds.zero_stage 3" in " ".join(command.words)
    return FUSED_ADAM if sleeps else ""


def planned(command, capsys):
    """The exit code and the output of `rlhf-stack plan` for the command on two nodes of eight GPUs."""
    words = command.words
    models = dict.fromkeys(words[index + 1] for index, word in enumerate(words) if word in MODELS)
    sizes = [word for model in models for word in ("--model", f"{model}={SIZES.get(model, LLAMA_8B)}")]
    cluster = ["--nodes", "2", "--gpus", "8", "--gpu-memory", "80"]
    launcher = [*command.launcher.split(), "-m", command.module]
    code = main(["plan", *cluster, *sizes, "--", *launcher, *words])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize("command", commands())
def test_script_is_planned_or_refused_with_the_reason(command, capsys):
    """A renamed flag is refused with its successor; with that, the run fits or the reason is the image's."""
    code, printed = planned(command, capsys)
    if command.renamed:
        assert code == REFUSED
        for old, new in command.renamed.items():
            assert old in printed
            assert new in printed
        code, printed = planned(command.corrected(), capsys)
    needed = operator(command)
    if not command.unsupported and needed and missing_for(needed):
        assert code == REFUSED, printed
        assert f"needs DeepSpeed's {needed}" in printed
        return
    expected = REFUSED if command.unsupported else TOO_LARGE if command.too_large else FITS
    assert code == expected, printed
    assert command.unsupported in printed
    assert command.too_large in printed


@SECTIONS
def test_reward_functions_and_agents_of_the_examples_find_what_they_import():
    """The docs say how to add what is not included."""
    assert [name for name in (*IMPORTED, NOT_INCLUDED) if find_spec(name) is None] == [NOT_INCLUDED]


@pytest.mark.skipif(
    devices.is_gpu() and version("openrlhf").startswith("0.5"),
    reason="vLLM's engine for CPUs is not in this image",
)
@pytest.mark.integration
@pytest.mark.timeout(SECONDS + 40)
@pytest.mark.parametrize("command", commands(lambda each: each.module == PPO and not each.untested))
def test_run_takes_two_steps(train, command):
    arguments = small(command.corrected())
    gpus = gpus_of_roles(arguments)
    run = train("published", (sum(gpus.values()), 2), STEPS, SECONDS, *arguments)
    assert run.code == 0, run.log[-8000:]
    assert [event["step"] for event in run.of("step")][:STEPS] == list(range(1, STEPS + 1))
    assert all(event["equal"] for event in run.of("verify"))
    assert run.left_over == []


@SECTIONS
@pytest.mark.integration
@pytest.mark.timeout(SECONDS + 40)
@pytest.mark.parametrize("command", commands(lambda each: each.module != PPO and not each.untested))
def test_supervised_training_takes_two_steps(tmp_path, command):
    make_files(tmp_path, experts="mixtral" in command.name)
    arguments = [word.replace("{folder}", str(tmp_path)) for word in small(command.corrected())]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launcher, "-m", command.module, *arguments],
        env=os.environ | replacing.variables(tmp_path) | {"HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert f"{STEPS}/{STEPS}" in done.stdout + done.stderr
    assert (tmp_path / "trained" / "config.json").exists()
