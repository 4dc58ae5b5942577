"""What serves vLLM 0.4, whose engine is a ``vllm.LLM`` and not asynchronous."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rlhf_stack.compat import determinism
from rlhf_stack.config import env_vars
from rlhf_stack.engine import actor, startup


class Parameters:
    """Stands for vllm.SamplingParams."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def clone(self) -> "Parameters":
        return Parameters(self.seed)


def hooks(executor: Any) -> actor.BlockingEngineHooks:
    made = actor.BlockingEngineHooks()
    model = SimpleNamespace(seed=3)
    made.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor, model_config=model))
    return made


def test_an_only_worker_is_called_directly() -> None:
    worker = SimpleNamespace(where=lambda *given: given)
    assert hooks(SimpleNamespace(driver_worker=worker)).call_workers("where", 1, 2) == [(1, 2)]


def test_several_workers_are_called_by_the_executor() -> None:
    executor = SimpleNamespace(_run_workers=lambda method, *given: [method, *given])
    assert hooks(executor).call_workers("where", 1) == ["where", 1]


def test_each_request_gets_a_seed_where_runs_have_to_be_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.REPEATABLE, "1")
    given: dict[str, Any] = {"sampling_params": Parameters(), "prompt_token_ids": [[1], [1], [2]]}
    seeds = [one.seed for one in hooks(None).repeatable_requests(given)["sampling_params"]]
    assert None not in seeds
    assert len(set(seeds)) == 3
    assert given["sampling_params"].seed is None, "the caller's own parameters are left alone"


@pytest.mark.parametrize(("flag", "seed"), [("0", None), ("1", 5)])
def test_otherwise_requests_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, flag: str, seed: int | None
) -> None:
    monkeypatch.setenv(env_vars.REPEATABLE, flag)
    given = {"sampling_params": Parameters(seed), "prompt_token_ids": [[1]]}
    assert hooks(None).repeatable_requests(given) is given


@pytest.mark.parametrize(
    ("accelerator", "module", "name"),
    [("cpu", "vllm.worker.cpu_worker", "CPUWorker"), ("rocm", "vllm.worker.worker", "Worker")],
)
def test_the_worker_class_is_that_of_the_accelerator(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, module: str, name: str
) -> None:
    fake = ModuleType(module)

    class Worker:
        """vLLM's own."""

    class Ours(Worker):
        """OpenRLHF's, in its place."""

    setattr(fake, name, Worker)
    for folder in ("vllm", "vllm.worker"):
        monkeypatch.setitem(sys.modules, folder, ModuleType(folder))
    monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.setenv(env_vars.ACCELERATOR, accelerator)
    assert issubclass(actor.worker_class(), Worker)
    assert issubclass(actor.worker_class(), startup.ToldStart)
    actor.use_worker_class(Ours)
    assert getattr(fake, name) is Ours


def items(*sequences: list[int]) -> list[Any]:
    return [SimpleNamespace(sequences=SimpleNamespace(tolist=lambda one=one: one)) for one in sequences]


@pytest.mark.parametrize(("flag", "expected"), [("1", [[1, 2], [1, 3]]), ("0", [[1, 3], [1, 2]])])
def test_a_critic_has_an_order_where_runs_have_to_be_repeatable(
    monkeypatch: pytest.MonkeyPatch, flag: str, expected: list[list[int]]
) -> None:
    monkeypatch.setenv(env_vars.REPEATABLE, flag)
    found = items([1, 3], [1, 2])
    determinism.order(found)
    assert [one.sequences.tolist() for one in found] == expected
