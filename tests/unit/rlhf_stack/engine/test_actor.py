"""Mixins of engine actors and workers for vLLM 0.4, whose engine is a blocking ``vllm.LLM``."""

import asyncio
import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.compat import determinism
from rlhf_stack.config import env_vars
from rlhf_stack.engine import actor, restarted, startup, worker_extension
from rlhf_stack.sync import SyncError


class Parameters:
    """Replaces vllm.SamplingParams."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def clone(self) -> "Parameters":
        return Parameters(self.seed)


def engine(executor: Any) -> actor.BlockingEngineMixin:
    mixin = actor.BlockingEngineMixin()
    model = SimpleNamespace(seed=3)
    mixin.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor, model_config=model))
    return mixin


def test_single_worker_is_called_directly() -> None:
    worker = SimpleNamespace(where=lambda *given: given)
    assert engine(SimpleNamespace(driver_worker=worker)).call_workers("where", 1, 2) == [(1, 2)]


@pytest.mark.parametrize("caches", [True, False])
def test_prompts_are_computed_again_after_a_sync(caches: bool) -> None:
    """vLLM 0.4 with --enable_prefix_caching would answer with keys and values of the former weights."""
    blocks = {number: SimpleNamespace(computed=True) for number in range(2)}
    evictor = {"evictor": SimpleNamespace(free_table=blocks)} if caches else {}
    blocking = engine(SimpleNamespace(driver_worker=SimpleNamespace(receive_weights=lambda *_: {})))
    manager = SimpleNamespace(gpu_allocator=SimpleNamespace(**evictor))
    blocking.llm.llm_engine.scheduler = SimpleNamespace(block_manager=manager)
    blocking.receive_weights([], 1, "raw", version=1)
    assert [block.computed for block in blocks.values()] == [not caches] * 2


def test_a_restarted_engine_does_not_join_by_the_call_for_its_predecessor() -> None:
    blocking = engine(SimpleNamespace(driver_worker=SimpleNamespace(join=lambda *given: given)))
    assert blocking.call_workers_of(blocking.process(), "join", 1) == [(1,)]
    with pytest.raises(SyncError, match="the engine was restarted before it joined"):
        blocking.call_workers_of("another", "join", 1)
    with pytest.raises(SyncError, match="the engine was restarted before it joined"):
        asyncio.run(actor.AsyncEngineMixin().call_workers_of("another", "join", 1))


@pytest.mark.parametrize(
    ("version", "at_start", "has"), [(0, False, False), (0, True, True), (2, False, True)]
)
def test_an_engine_that_was_restarted_after_a_sync_still_lacks_its_weights(
    monkeypatch: pytest.MonkeyPatch, version: int, at_start: bool, has: bool
) -> None:
    received = MagicMock()
    monkeypatch.setattr(restarted, "weights_received", received)
    found = actor.AsyncEngineMixin()
    found.weight_version = version
    assert asyncio.run(found.weights_received(at_start)) == (version, 0)
    assert received.called == has


QUERIES = {"where", "needs_weights", "call_workers_of", "forget_former_weights"}


@pytest.mark.parametrize(
    ("restarts", "repeated"),
    [
        ("0", {*QUERIES, "sleep", "leave_weight_group"}),
        ("1", QUERIES),
    ],
)
def test_ray_repeats_calls_of_upstreams_methods_and_ours(
    restarts: str, repeated: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where engines are restarted, not those that a restarted engine must not execute."""
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, restarts)
    names = set[str]()

    def of_ray(max_task_retries: int) -> Any:
        assert max_task_retries == -1

        def decorated(function: Any) -> Any:
            names.add(function.__name__)
            return function

        return decorated

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(method=of_ray))

    class Engine(actor.AsyncEngineMixin):
        async def sleep(self) -> None:
            """Upstream's."""

        async def generate_responses(self) -> None:
            """Not repeated."""

    assert names == repeated

    class OfRay(Engine):
        """As Ray makes one of each actor's class."""

    assert OfRay.where is Engine.where
    assert OfRay.sleep is Engine.sleep
    assert hasattr(Engine.where, "__wrapped__")
    assert not hasattr(Engine.generate_responses, "__wrapped__")
    assert not hasattr(Engine.receive_weights, "__wrapped__"), "a restarted engine must not execute it"


def test_several_workers_are_called_through_the_executor() -> None:
    executor = SimpleNamespace(_run_workers=lambda method, *given: [method, *given])
    assert engine(executor).call_workers("where", 1) == ["where", 1]


def request_seeds(answering: actor.BlockingEngineMixin, base: int | None) -> list[int | None]:
    """The seeds of a batch with one prompt twice; the engine must not change the caller's parameters."""
    given: dict[str, Any] = {"sampling_params": Parameters(base), "prompt_token_ids": [[1], [1], [2]]}
    seeds = [one.seed for one in answering.seed_requests(given)["sampling_params"]]
    assert given["sampling_params"].seed == base
    return seeds


def test_each_request_has_its_own_seed_if_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.REPEATABLE, "1")
    other = engine(None)
    other.llm.llm_engine.model_config.seed = 4
    batches = [(engine(None), None), (engine(None), 5), (engine(None), 6), (other, 5)]
    seeds = [seed for answering, base in batches for seed in request_seeds(answering, base)]
    assert None not in seeds
    assert len(set(seeds)) == 3 * len(batches)


def test_an_engine_that_has_answered_the_same_prompts_before_gives_them_the_seeds_of_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine of a run that was continued from a checkpoint has not answered them."""
    monkeypatch.setenv(env_vars.REPEATABLE, "1")
    undisturbed, continued = engine(None), engine(None)
    request_seeds(undisturbed, 5)
    assert request_seeds(undisturbed, 6) == request_seeds(continued, 6)


@pytest.mark.parametrize("seed", [None, 5])
def test_requests_are_unchanged_otherwise(monkeypatch: pytest.MonkeyPatch, seed: int | None) -> None:
    monkeypatch.setenv(env_vars.REPEATABLE, "0")
    given = {"sampling_params": Parameters(seed), "prompt_token_ids": [[1]]}
    assert engine(None).seed_requests(given) is given


@pytest.mark.parametrize(
    ("accelerator", "module", "name"),
    [("cpu", "vllm.worker.cpu_worker", "CPUWorker"), ("rocm", "vllm.worker.worker", "Worker")],
)
def test_worker_class_follows_the_accelerator(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, module: str, name: str
) -> None:
    fake = ModuleType(module)

    class Worker:
        """vLLM's worker."""

    class Ours(Worker):
        """OpenRLHF's replacement."""

    setattr(fake, name, Worker)
    for folder in ("vllm", "vllm.worker"):
        monkeypatch.setitem(sys.modules, folder, ModuleType(folder))
    monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.setenv(env_vars.ACCELERATOR, accelerator)
    assert issubclass(worker_extension.worker_class(), Worker)
    assert issubclass(worker_extension.worker_class(), startup.InstrumentedStartup)
    worker_extension.use_worker_class(Ours)
    assert getattr(fake, name) is Ours


def tensor(*numbers: float) -> Any:
    return SimpleNamespace(tolist=lambda: list(numbers))


@pytest.mark.parametrize(("flag", "expected"), [("1", [3, 2, 1, 0]), ("0", [0, 1, 2, 3])])
def test_experiences_are_sorted_if_repeatable(
    monkeypatch: pytest.MonkeyPatch, flag: str, expected: list[int]
) -> None:
    """By their values and returns, if the sequences of two ranks are equal."""
    monkeypatch.setenv(env_vars.REPEATABLE, flag)
    content = [((1, 3), 0, 0), ((1, 2), 2, 0), ((1, 2), 1, 4), ((1, 2), 1, 3)]
    found = [
        SimpleNamespace(sequences=tensor(*tokens), values=tensor(value), returns=tensor(end), number=number)
        for number, (tokens, value, end) in enumerate(content)
    ]
    determinism.sort_experiences(found)
    assert [one.number for one in found] == expected


def request(prompt: int, prefilled: bool, most: int, answered: int) -> SimpleNamespace:
    """The state of a request in vLLM's output processor."""
    return SimpleNamespace(
        prompt_len=prompt,
        is_prefilling=not prefilled,
        max_tokens_param=most,
        detokenizer=SimpleNamespace(num_output_tokens=lambda: answered),
    )


@pytest.mark.parametrize(
    ("requests", "work"),
    [
        ([], 0),
        ([request(100, False, 50, 0)], 150),
        ([request(100, True, 50, 0)], 50),
        ([request(100, True, 50, 49)], 1),
        ([request(100, False, 50, 0), request(10, True, 20, 5)], 165),
    ],
)
def test_the_unfinished_work_is_what_is_left_of_prompts_and_answers(requests: list[Any], work: int) -> None:
    """The balancer sends a prompt to the engine with the least; a prompt counts until it is prefilled."""
    mixin = actor.AsyncEngineMixin()
    states = dict(enumerate(requests))
    mixin.llm = SimpleNamespace(output_processor=SimpleNamespace(request_states=states))
    assert mixin.unfinished_work() == work


def test_an_answer_that_a_weight_sync_interrupts_has_two_versions_and_is_counted_once() -> None:
    async def call_workers(method: str, *arguments: Any) -> list[Any]:
        return [method, *arguments]

    async def outputs(syncs: list[int], mixin: Any, reports: list[Any]) -> Any:
        for version in syncs:
            if version:
                reports.append(await mixin.receive_weights([], 1, "full", version=version))
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0], finish_reason=None)])

    async def run() -> tuple[list[tuple[int, int]], list[int]]:
        mixin, reports, last = actor.AsyncEngineMixin(), list[Any](), []
        mixin.call_workers = call_workers  # type: ignore[method-assign]
        for syncs in ([0, 0], [0, 1, 0], [0]):
            async for output in mixin.measured(outputs(syncs, mixin, reports)):
                versions = output.weight_versions
            last.append(versions)
        for version in (2, 3):
            reports.append(await mixin.receive_weights([], 1, "full", version=version))
        return last, [report["mixed"] for report in reports]

    assert asyncio.run(run()) == ([(0, 0), (0, 1), (1, 1)], [0, 1, 0])


def test_an_engine_whose_process_has_died_ends_when_it_is_put_to_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray restarts the actor then; the error of vLLM would end the run."""
    monkeypatch.setenv(env_vars.ENGINE_RESTARTS, "1")
    monkeypatch.setattr(restarted, "end_process", MagicMock(side_effect=SystemExit))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(method=lambda **_: lambda function: function))

    class Engine(actor.AsyncEngineMixin):
        def __init__(self) -> None:
            self.llm = SimpleNamespace(errored=True)

        async def sleep(self, level: int = 1) -> None:
            raise ValueError(f"EngineDeadError {level}")

    class OfRay(Engine):
        """As Ray makes one of each actor's class."""

    assert OfRay.sleep is Engine.sleep
    with pytest.raises(SystemExit):
        asyncio.run(OfRay().sleep(level=2))
    alive = Engine()
    alive.llm.errored = False
    with pytest.raises(ValueError, match="EngineDeadError 1"):
        asyncio.run(alive.sleep())


def test_the_errors_of_workers_are_raised_once_all_have_answered() -> None:
    """vLLM stops at the first error: the next call got the other ranks' answers to this one."""

    class Worker(worker_extension.WorkerMixin):
        def __init__(self, error: Exception | None) -> None:
            self.error = error

        def receive(self, what: str) -> str:
            if self.error:
                raise self.error
            return what

    async def call(*errors: Exception | None) -> Any:
        async def collective_rpc(method: str, args: tuple[Any, ...]) -> list[Any]:
            return [getattr(Worker(error), method)(*args) for error in errors]

        mixin = actor.AsyncEngineMixin()
        mixin.llm = SimpleNamespace(collective_rpc=collective_rpc, errored=False)
        return await mixin.call_workers("receive", "weights")

    assert asyncio.run(call(None, None)) == ["weights", "weights"]
    with pytest.raises(SyncError, match="rank 2 does not answer"):
        asyncio.run(call(None, SyncError("rank 2 does not answer"), KeyError("x")))
    with pytest.raises(RuntimeError, match="KeyError: 'x'"):
        asyncio.run(call(KeyError("x"), None))


def test_a_restarted_engine_without_weights_refuses_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarted, "needs_weights", lambda: True)

    async def run() -> None:
        async for _ in actor.AsyncEngineMixin().measured(MagicMock()):
            pytest.fail("it has answered")

    with pytest.raises(restarted.NeedsWeightsError, match="lacks the trainer's weights") as raised:
        asyncio.run(run())
    assert isinstance(pickle.loads(pickle.dumps(raised.value)), restarted.NeedsWeightsError)  # noqa: S301


@pytest.mark.parametrize(
    ("prefixes", "is_reset", "calls"),
    [
        (False, True, ["images"]),
        (True, True, ["prefixes", "images"]),
        (True, False, ["prefixes", "all", "images"]),
    ],
)
def test_a_cache_that_a_running_request_holds_is_dropped_too(
    prefixes: bool, is_reset: bool, calls: list[str]
) -> None:
    """vLLM returns False then, which upstream ignores: keys and values of the former weights were used."""
    made: list[str] = []

    async def reset_prefix_cache(reset_running_requests: bool = False) -> bool:
        made.append("all" if reset_running_requests else "prefixes")
        return is_reset

    async def reset_encoder_cache() -> None:
        made.append("images")

    mixin = actor.AsyncEngineMixin()
    mixin.llm = SimpleNamespace(
        reset_prefix_cache=reset_prefix_cache, reset_encoder_cache=reset_encoder_cache
    )
    asyncio.run(mixin.forget_former_weights(prefixes))
    assert made == calls


def test_an_answer_that_vllm_has_aborted_is_an_error() -> None:
    """As it does when the engine falls asleep: the trainer would take the tokens until then."""

    async def outputs() -> Any:
        for reason in (None, "abort"):
            answer = SimpleNamespace(token_ids=[1], finish_reason=reason)
            yield SimpleNamespace(prompt_token_ids=[1], outputs=[answer])

    async def run() -> None:
        async for output in actor.AsyncEngineMixin().measured(outputs()):
            assert output.outputs[0].finish_reason is None

    with pytest.raises(RuntimeError, match="vLLM aborted an answer: its engine was put to sleep"):
        asyncio.run(run())


def test_an_error_of_a_former_sync_group_does_not_count() -> None:
    """A sync may end when the engine has left its group: its error is not of the next one."""

    async def run() -> list[str | None]:
        mixin, ended = actor.AsyncEngineMixin(), asyncio.Event()

        async def call_workers(method: str, *_: Any) -> list[Any]:
            if method == "leave_weight_group":
                return []
            await ended.wait()
            raise SyncError("rank 2 does not answer")

        mixin.call_workers = call_workers  # type: ignore[method-assign]
        late = asyncio.ensure_future(mixin.receive_weights([], 1, "full", version=1))
        await asyncio.sleep(0)
        await mixin.leave_weight_group()
        ended.set()
        found = []
        joining = mixin.call_workers_of(mixin.process(), "join_weight_group")
        for sync in (late, mixin.receive_weights([], 1, "full", version=2), joining):
            with pytest.raises(SyncError, match="rank 2"):
                await sync
            found.append(await mixin.sync_error())
            await mixin.leave_weight_group()
        return [*found, await mixin.sync_error()]

    assert asyncio.run(run()) == [None, "rank 2 does not answer", "rank 2 does not answer", None]
