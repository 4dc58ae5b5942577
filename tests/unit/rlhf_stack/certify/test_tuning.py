"""What certify records of `tune`: settings with reasons for the demo's run, or why there are none."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.certify import tuning
from rlhf_stack.config import env_vars
from rlhf_stack.openrlhf import command_line
from rlhf_stack.placement import FreeNode
from rlhf_stack.planning import cluster_spec
from rlhf_stack.planning.cluster_spec import Machine

from tests.unit import openrlhf_arguments

GIB = 1 << 30
CONFIG = {
    **{"model_type": "qwen2", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"tie_word_embeddings": False, "architectures": ["Qwen2ForCausalLM"]},
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The folder of a model like the demo's."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(tmp_path)


def parsed(release: str, model: str) -> command_line.Parsed:
    """A run of one GPU per role, with the arguments of a release."""
    if release == "0.5.1":
        one = {name: 1 for name in openrlhf_arguments.FLAT if "num_gpus" in name or "num_nodes" in name}
        names = dict.fromkeys(("pretrain", "critic_pretrain", "reward_pretrain"), model)
        shared = {"colocate_actor_ref": True, "colocate_critic_reward": True}
        engines = {"vllm_num_engines": 1, "vllm_tensor_parallel_size": 1}
        values = openrlhf_arguments.flat(**one, **names, **shared, **engines)
    else:
        roles = ("actor", "ref", "critic", "reward")
        changes: dict[str, Any] = {f"{role}__model_name_or_path": model for role in roles}
        changes |= {f"{role}__num_gpus_per_node": 1 for role in roles}
        changes |= {"vllm__num_engines": 1, "vllm__tensor_parallel_size": 1, "train__colocate_all": True}
        values = openrlhf_arguments.sections(**changes, vllm__enable_sleep=True)
    return command_line.Parsed(release, values, ())


@pytest.mark.parametrize("release", ["0.5.1", "0.11.2"])
@pytest.mark.parametrize(("memory", "fits"), [(80 * GIB, True), (GIB // 64, False)])
def test_settings_or_problems_are_recorded(
    monkeypatch: pytest.MonkeyPatch, model: str, release: str, memory: int, fits: bool
) -> None:
    monkeypatch.setattr(command_line, "parse", lambda _: parsed(release, model))
    machines = [Machine("a", 4, 64.0, memory, 256 * GIB)]
    found = tuning.tuned(machines, [])
    assert (found["problems"] == []) == fits
    assert bool(found["settings"]) == fits
    assert json.loads(json.dumps(found)) == found


def test_arguments_that_openrlhf_rejects_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = MagicMock(side_effect=command_line.ArgumentsError("unrecognized arguments: --bogus"))
    monkeypatch.setattr(command_line, "parse", refuse)
    assert tuning.tuned([], []) == {"settings": {}, "problems": ["unrecognized arguments: --bogus"]}


@pytest.mark.parametrize(("accelerator", "host"), [("cuda", 9), ("cpu", 0)])
def test_the_run_is_tuned_on_a_node_with_its_model_for_the_memory_of_each(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, host: int
) -> None:
    """The head has neither a GPU nor the files of the run; the host of fake GPUs does not count."""
    monkeypatch.setenv(env_vars.ACCELERATOR, accelerator)
    nodes = [FreeNode("left", 8, 4, 8), FreeNode("right", 8, 4, 8)]
    calls: list[tuple[Any, ...]] = []

    def on_every_node(where: list[FreeNode], function: object, *arguments: Any, **_: float) -> list[Any]:
        calls.append(([node.address for node in where], function, *arguments))
        return [80, 40] if function is tuning.gpu_memory else [{"settings": {}, "problems": []}]

    monkeypatch.setattr(tuning, "on_every_node", on_every_node)
    machines = [Machine(name, gpus, 4.0, 0, 9) for name, gpus in (("head", 0), ("left", 8), ("right", 8))]
    monkeypatch.setattr(cluster_spec, "ray_machines", lambda _: machines)
    found = tuning.choose(nodes, ["--flag"])
    assert found == {"gpu_memory": {"left": 80, "right": 40}, "settings": {}, "problems": []}
    where, function, known, arguments = calls[1]
    assert (where, function, arguments) == (["left"], tuning.tuned, ["--flag"])
    assert [(machine.gpu_memory, machine.memory) for machine in known] == [(0, host), (80, host), (40, host)]


def test_a_node_that_does_not_answer_is_a_problem_of_the_tuning_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = MagicMock(side_effect=RuntimeError("left: no answer within 120 s"))
    monkeypatch.setattr(tuning, "on_every_node", silent)
    found = tuning.choose([FreeNode("left", 8, 4, 8)], [])
    assert found == {"settings": {}, "problems": ["left: no answer within 120 s"]}


def test_memory_is_that_of_the_smallest_gpu_also_without_one_of_rays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(env_vars.ACCELERATOR, "cuda")
    sizes = [80 * GIB, 40 * GIB]
    gpus = SimpleNamespace(
        device_count=lambda: len(sizes),
        get_device_properties=lambda index: SimpleNamespace(total_memory=sizes[index]),
    )
    monkeypatch.setattr(tuning, "torch", SimpleNamespace(cuda=gpus))
    assert tuning.gpu_memory() == 40 * GIB
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv(env_vars.ACCELERATOR, "cpu")
    assert tuning.gpu_memory() == tuning.ASSUMED
