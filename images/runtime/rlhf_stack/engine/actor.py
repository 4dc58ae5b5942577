"""Methods that this distribution adds to OpenRLHF's engine actors, asynchronous (0.11) and blocking (0.5)."""

import functools
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlhf_stack.cluster.answer_once import repeated
from rlhf_stack.compat.determinism import ATTEMPT, BASE, RequestSeeds
from rlhf_stack.config import env_vars
from rlhf_stack.engine import restarted
from rlhf_stack.engine.worker_extension import failure_in, own_node
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.telemetry.throughput import Meter

# Methods, upstream's and ours, whose calls Ray repeats if a connection breaks. Those of a sync are not among
# them: a restarted engine must not execute them. Neither is generation: its prompts go to other engines.
REPEATED = {"call_workers_of", "forget_former_weights", "init_process_group", "needs_weights", "where"}
# Ray would repeat these on a restarted engine too, at any time in the seconds after its start: one that
# generates would fall asleep. Where engines are restarted, `roster.ask` calls a living one again.
REPEATED_ON_ONE_PROCESS = {
    "leave_weight_group",
    "pause_generation",
    "resume_generation",
    "sleep",
    "wake_up",
}
UPSTREAMS = ("pause_generation", "reset_prefix_cache", "resume_generation", "sleep", "wake_up")
ABORTED = "abort"  # vLLM's reason for the end of an answer
ENDING = "_rlhf_stack_ending"  # an attribute of a decorated method
PROCESS = uuid.uuid4().hex  # of this process: a restarted engine has another


class _EngineState:
    """State of an engine actor, created on first use: upstream's constructor calls no base constructor.

    ``weight_version`` is that which the last sync has sent; 0 is what the engine loaded when it started.
    """

    _meter: Meter
    _sync_error: str | None = None
    _groups_left = 0  # sync groups: the error of a former one does not count
    weight_version = 0
    _mixed = 0  # answers since the last sync that began with the weights of an earlier version
    _last_mixed = 0

    def _throughput_meter(self) -> Meter:
        if not hasattr(self, "_meter"):
            self._meter = Meter()
        return self._meter

    @contextmanager
    def _recorded_sync_error(self) -> Iterator[None]:
        """Record the error with which this context ends, unless the engine has left the group meanwhile."""
        group = self._groups_left
        try:
            yield
        except Exception as error:
            if group == self._groups_left:
                self._sync_error = str(error)
            raise

    def process(self) -> str:
        """Return an id of this process, for `call_workers_of`."""
        return PROCESS


def _require(process: str) -> None:
    """Raise `SyncError` unless this process is ``process``."""
    if process != PROCESS:
        raise SyncError("the engine was restarted before it joined the weight-sync group")


class AsyncEngineMixin(_EngineState):
    """A base of ``RolloutRayActor``, which drives one asynchronous vLLM engine in ``self.llm``."""

    llm: Any
    kwargs: dict[str, Any]
    _request_seeds: RequestSeeds

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        repeats = REPEATED if env_vars.engine_restarts() else REPEATED | REPEATED_ON_ONE_PROCESS
        for name in UPSTREAMS:
            if hasattr(cls, name):
                setattr(cls, name, _ending_with_engine(getattr(cls, name)))
        for name in repeats:
            if hasattr(cls, name):
                setattr(cls, name, repeated(getattr(cls, name)))

    def request_parameters(self, tokens: Sequence[int], parameters: Any) -> Any:
        """Return vLLM's ``SamplingParams`` of one request, with its own seed if runs must be repeatable."""
        if env_vars.flag(env_vars.REPEATABLE) and parameters.seed is None:
            if not hasattr(self, "_request_seeds"):
                self._request_seeds = RequestSeeds(self.kwargs["seed"])
            given = parameters.extra_args or {}
            parameters.seed = self._request_seeds.next(tokens, given.get(BASE), given.get(ATTEMPT, 1))
        return parameters

    async def receive_weights(
        self, parameters: Sequence[Any], limit: int, encoding: str, *, version: int = 0
    ) -> dict[str, Any]:
        """Run one weight sync, after which the engine has ``version``.

        Returns each worker's report (``ranks``), the ``work`` since the last sync, and how many answers of
        that time are ``mixed``: they began with the weights of another version than they ended with.
        """
        with self._recorded_sync_error():
            ranks = await self.call_workers("receive_weights", parameters, limit, encoding)
        self.weight_version = version
        self._last_mixed, self._mixed = self._mixed, 0
        return {"ranks": ranks, "work": self._throughput_meter().take(), "mixed": self._last_mixed}

    async def weights_received(self, at_start: bool = False) -> tuple[int, int]:
        """Note that this engine has the weights of all others: it answers prompts if it was restarted.

        It has them if it took part in a sync, and ``at_start``, when no engine has others. Returns their
        version, and the mixed answers that the last `receive_weights` returned.
        """
        if at_start or self.weight_version:
            restarted.weights_received()
        return self.weight_version, self._last_mixed

    async def forget_former_weights(self, prefixes: bool) -> None:
        """Drop what vLLM keeps of computations with the weights before a sync: embeddings of images.

        With ``prefixes`` also keys and values of prompts. A request in progress that holds some, such as one
        whose trainer has lost the connection and asked again, computes them again.
        """
        with self._ending_with_engine():
            if prefixes and not await self.llm.reset_prefix_cache():
                await self.llm.reset_prefix_cache(reset_running_requests=True)
            await self.llm.reset_encoder_cache()

    async def leave_weight_group(self) -> None:
        """Leave the sync group, which is formed again; the error of its last sync no longer counts."""
        self._sync_error = None
        self._groups_left += 1
        await self.call_workers("leave_weight_group")

    async def sync_error(self) -> str | None:
        """Return the error of a weight sync that failed in this engine, or None."""
        return self._sync_error

    async def log_probabilities(self, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each of ``tokens`` but the first."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.utils import random_uuid

        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompt = TokensPrompt(prompt_token_ids=list(tokens))
        async for output in self.llm.generate(prompt, sampling, request_id=random_uuid()):
            given = output.prompt_logprobs
        return [choices[token].logprob for token, choices in zip(tokens[1:], given[1:], strict=True)]

    async def needs_weights(self) -> bool:
        """Report whether this engine was restarted and has not received the trainer's weights since."""
        self._end_if_engine_died()
        return restarted.needs_weights()

    async def measured(self, outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Yield the outputs of one vLLM request and count their tokens.

        Each has ``weight_versions``: that with which the request began, and that of the output.
        `RuntimeError` if vLLM has ended the request early, as when the engine falls asleep meanwhile: the
        trainer would take the truncated answer. `NeedsWeightsError` if this process has replaced the one that
        the trainer has chosen.
        """
        if restarted.needs_weights():
            raise restarted.NeedsWeightsError("this engine was restarted and lacks the trainer's weights")
        first = self.weight_version
        with self._ending_with_engine():
            async for output in self._throughput_meter().measured(outputs):
                if any(answer.finish_reason == ABORTED for answer in output.outputs):
                    raise RuntimeError("vLLM aborted an answer: its engine was put to sleep, or paused")
                output.weight_versions = first, self.weight_version
                yield output
        self._mixed += first != self.weight_version

    def unfinished_work(self) -> int | None:
        """Return the maximum of remaining tokens: prompt tokens not yet prefilled, and answer tokens.

        None if this engine must not answer prompts, because it `needs_weights`.
        """
        self._end_if_engine_died()
        if restarted.needs_weights():
            return None
        states = self.llm.output_processor.request_states.values()
        work: int = sum(
            (state.prompt_len if state.is_prefilling else 0)
            + state.max_tokens_param
            - state.detokenizer.num_output_tokens()
            for state in states
        )
        return work

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `WorkerMixin` in each worker of this engine; return the results by rank.

        Raises the error of the first rank that has one, once all ranks have answered.
        """
        with self._ending_with_engine():
            results: list[Any] = await self.llm.collective_rpc("answer", args=(method, *arguments))
            if (failure := failure_in(results)) is not None:
                raise failure
        return results

    async def call_workers_of(self, process: str, method: str, *arguments: Any) -> list[Any]:
        """`call_workers`, unless this engine was restarted since its `process` was asked for.

        An error, such as one of joining a trainer that has stopped, counts as one of a sync.
        """
        _require(process)
        with self._recorded_sync_error():
            return await self.call_workers(method, *arguments)

    @contextmanager
    def _ending_with_engine(self) -> Iterator[None]:
        """End this actor if vLLM's engine process has died: the actor's process alone is of no use."""
        try:
            yield
        except Exception:
            self._end_if_engine_died()
            raise

    def _end_if_engine_died(self) -> None:
        if env_vars.engine_restarts() and self.llm.errored:
            restarted.end_process("vLLM's engine process has died")

    async def where(self) -> list[dict[str, Any]]:
        """Return `WorkerMixin.where` of each worker; child processes of this actor are on its node."""
        return [own_node() | worker for worker in await self.call_workers("where")]


def _ending_with_engine(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Decorate one of upstream's methods of an engine: see `AsyncEngineMixin._ending_with_engine`.

    A method that is decorated already is returned: Ray makes a subclass of an actor's class.
    """
    if hasattr(method, ENDING):
        return method

    @functools.wraps(method)
    async def ending(engine: AsyncEngineMixin, *arguments: Any, **options: Any) -> Any:
        with engine._ending_with_engine():
            return await method(engine, *arguments, **options)

    setattr(ending, ENDING, True)
    return ending


class BlockingEngineMixin(_EngineState):
    """A base of ``LLMRayActor``, which drives one ``vllm.LLM`` in ``self.llm`` (vLLM 0.4).

    No method is asynchronous: a single one would make Ray run all methods of the actor in an event loop.
    """

    llm: Any

    def receive_weights(
        self, parameters: Sequence[Any], limit: int, encoding: str, *, version: int = 0
    ) -> dict[str, Any]:
        """See `AsyncEngineMixin.receive_weights`; no answer is in progress meanwhile."""
        with self._recorded_sync_error():
            ranks = self.call_workers("receive_weights", parameters, limit, encoding)
            self._forget_prompts()
        self.weight_version = version
        return {"ranks": ranks, "work": self._throughput_meter().take(), "mixed": 0}

    def _forget_prompts(self) -> None:
        """Let vLLM compute the keys and values of cached prompts again (--enable_prefix_caching).

        vLLM 0.4 finds them by their tokens alone. Without a request in progress all are in the evictor.
        """
        allocator = self.llm.llm_engine.scheduler.block_manager.gpu_allocator
        if hasattr(allocator, "evictor"):  # prefixes are cached
            for block in allocator.evictor.free_table.values():
                block.computed = False

    def sync_error(self) -> str | None:
        """Return the error of a weight sync that failed in this engine, or None."""
        return self._sync_error

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `WorkerMixin` in each worker of this engine; return the results by rank."""
        executor = self.llm.llm_engine.model_executor
        if hasattr(executor, "_run_workers"):  # several workers: the first is in this process
            results: list[Any] = executor._run_workers(method, *arguments)
            return results
        return [getattr(executor.driver_worker, method)(*arguments)]

    def call_workers_of(self, process: str, method: str, *arguments: Any) -> list[Any]:
        """See `AsyncEngineMixin.call_workers_of`."""
        _require(process)
        with self._recorded_sync_error():
            return self.call_workers(method, *arguments)

    def where(self) -> list[dict[str, Any]]:
        """Return `WorkerMixin.where` of each worker; a worker in this process is on its node."""
        return [own_node() | worker for worker in self.call_workers("where")]

    def seed_requests(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``LLM.generate``, with a seed per request if runs must be repeatable.

        The seed that the trainer gives is the base of all of them, see `determinism.rollout_seed`.
        """
        parameters = arguments.get("sampling_params")
        if not env_vars.flag(env_vars.REPEATABLE) or parameters is None:
            return arguments
        seeds = RequestSeeds(f"{self.llm.llm_engine.model_config.seed} {parameters.seed}")
        per_request = [parameters.clone() for _ in arguments["prompt_token_ids"]]
        for request, tokens in zip(per_request, arguments["prompt_token_ids"], strict=True):
            request.seed = seeds.next(tokens)
        return arguments | {"sampling_params": per_request}


def count_generated_tokens(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``LLMRayActor.generate``, which returns vLLM's outputs, so that its tokens are counted."""

    @functools.wraps(generate)
    def counted(actor: BlockingEngineMixin, *arguments: Any, **options: Any) -> Any:
        meter, tokens = actor._throughput_meter(), 0
        meter.begin()
        try:
            outputs = generate(actor, *arguments, **options)
            tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        finally:
            meter.end(tokens)
        return outputs

    return counted
