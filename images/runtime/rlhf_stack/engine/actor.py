"""What this distribution adds to OpenRLHF's engine actor and to the vLLM workers behind it."""

import functools
import importlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.compat.determinism import RequestSeeds
from rlhf_stack.config import env_vars
from rlhf_stack.engine import startup
from rlhf_stack.sync import digest, weight_layout
from rlhf_stack.sync.receiving import receive
from rlhf_stack.telemetry.throughput import Meter

WORKERS = {"cuda": ("vllm.worker.worker", "Worker"), "cpu": ("vllm.worker.cpu_worker", "CPUWorker")}


class _Measured:
    """What an engine actor keeps; upstream's constructor calls no other."""

    _meter: Meter
    _sync_error: str | None = None

    def _metered(self) -> Meter:
        if not hasattr(self, "_meter"):
            self._meter = Meter()
        return self._meter


class EngineHooks(_Measured):
    """A base of ``RolloutRayActor``, which drives one asynchronous vLLM engine in ``self.llm``."""

    llm: Any
    kwargs: dict[str, Any]
    _request_seeds: RequestSeeds

    def request_parameters(self, tokens: Sequence[int], parameters: Any) -> Any:
        """vLLM's ``SamplingParams`` for one request, with a seed of its own if runs have to be repeatable."""
        if env_vars.flag(env_vars.REPEATABLE) and parameters.seed is None:
            if not hasattr(self, "_request_seeds"):
                self._request_seeds = RequestSeeds(self.kwargs["seed"])
            parameters.seed = self._request_seeds.next(tokens)
        return parameters

    async def receive_weights(self, parameters: Sequence[Any], limit: int) -> dict[str, Any]:
        """One sync: what each worker said of it (``ranks``), and the work since the last one."""
        try:
            ranks = await self.call_workers("receive_weights", parameters, limit)
        except Exception as error:
            self._sync_error = str(error)
            raise
        return {"ranks": ranks, "work": self._metered().take()}

    async def sync_error(self) -> str | None:
        """Why a sync failed here, if one has."""
        return self._sync_error

    def measured(self, outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The outputs of one of vLLM's requests, counted."""
        return self._metered().measured(outputs)

    def unfinished_work(self) -> int:
        """Tokens that the engine's requests need at most: of prompts not read yet, and of answers."""
        states = self.llm.output_processor.request_states.values()
        return sum(
            (state.prompt_len if state.is_prefilling else 0)
            + state.max_tokens_param
            - state.detokenizer.num_output_tokens()
            for state in states
        )

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """The results of a method of `WorkerHooks` in each worker of this engine, by rank."""
        results: list[Any] = await self.llm.collective_rpc(method, args=arguments)
        return results

    async def where(self) -> list[dict[str, Any]]:
        """`WorkerHooks.where` of each worker; child processes of this actor are on its own node."""
        return [_own_place() | worker for worker in await self.call_workers("where")]


class BlockingEngineHooks(_Measured):
    """A base of ``LLMRayActor``, which drives one ``vllm.LLM`` in ``self.llm`` (vLLM 0.4).

    Nothing here is asynchronous: one such method would make Ray run all of the actor's in an event loop.
    """

    llm: Any
    _request_seeds: RequestSeeds

    def receive_weights(self, parameters: Sequence[Any], limit: int) -> dict[str, Any]:
        """See `EngineHooks.receive_weights`."""
        try:
            ranks = self.call_workers("receive_weights", parameters, limit)
        except Exception as error:
            self._sync_error = str(error)
            raise
        return {"ranks": ranks, "work": self._metered().take()}

    def sync_error(self) -> str | None:
        """Why a sync failed here, if one has."""
        return self._sync_error

    def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """The results of a method of `WorkerHooks` in each worker of this engine, by rank."""
        executor = self.llm.llm_engine.model_executor
        if hasattr(executor, "_run_workers"):  # several workers: the first is in this process
            results: list[Any] = executor._run_workers(method, *arguments)
            return results
        return [getattr(executor.driver_worker, method)(*arguments)]

    def where(self) -> list[dict[str, Any]]:
        """`WorkerHooks.where` of each worker; those in this process are on its own node."""
        return [_own_place() | worker for worker in self.call_workers("where")]

    def seed_requests(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of ``LLM.generate``, with a seed for each request if runs have to be repeatable."""
        parameters = arguments.get("sampling_params")
        if not env_vars.flag(env_vars.REPEATABLE) or parameters is None or parameters.seed is not None:
            return arguments
        if not hasattr(self, "_request_seeds"):
            self._request_seeds = RequestSeeds(self.llm.llm_engine.model_config.seed)
        each = [parameters.clone() for _ in arguments["prompt_token_ids"]]
        for one, tokens in zip(each, arguments["prompt_token_ids"], strict=True):
            one.seed = self._request_seeds.next(tokens)
        return arguments | {"sampling_params": each}


def count_generated_tokens(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``LLMRayActor.generate``, which returns vLLM's outputs, so that its tokens are counted."""

    @functools.wraps(generate)
    def counted(actor: BlockingEngineHooks, *arguments: Any, **options: Any) -> Any:
        meter, tokens = actor._metered(), 0
        meter.begin()
        try:
            outputs = generate(actor, *arguments, **options)
            tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        finally:
            meter.end(tokens)
        return outputs

    return counted


def worker_class() -> Any:
    """A subclass of vLLM 0.4's worker on this accelerator, with `WorkerHooks` and reported startup."""
    module, name = WORKERS[devices.device_type()]
    bases = (WorkerHooks, startup.InstrumentedStartup, getattr(importlib.import_module(module), name))
    return type("InstrumentedWorker", bases, {})


def use_worker_class(replacement: type) -> None:
    """Let vLLM 0.4 make an engine's only worker of ``replacement``, a subclass of `worker_class`."""
    module, name = WORKERS[devices.device_type()]
    setattr(importlib.import_module(module), name, replacement)


def _own_place() -> dict[str, Any]:
    """The node of this process, which must be a Ray actor."""
    import ray

    return {"node": ray.util.get_node_ip_address(), "node_id": ray.get_runtime_context().get_node_id()}


class WorkerHooks:
    """A base of ``WorkerWrap``, which vLLM mixes into its worker class."""

    model_runner: Any
    model_config: Any
    _model_update_group: Any
    _weight_layout: weight_layout.Layout

    def where(self) -> dict[str, Any]:
        """Where this worker runs: rank in the engine, GPU, host name, process, and its node if known."""
        import ray
        import torch

        answer: dict[str, Any] = {
            "rank": torch.distributed.get_rank(),
            "gpu": devices.physical_gpu_id(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        if ray.is_initialized():  # a Ray actor, and not a child process of one
            answer |= _own_place()
        return answer

    def receive_weights(self, parameters: Sequence[Any], limit: int) -> dict[str, Any]:
        """Take and load the trainer's ``parameters``; see `rlhf_stack.sync.receiving`."""
        group, load = self._model_update_group, self.model_runner.model.load_weights
        return receive(group, parameters, limit, devices.torch_device(), load, self.model_config.dtype)

    def weight_digests(self, parameters: Sequence[tuple[str, list[int]]]) -> list[dict[str, Any]]:
        """Which elements of the trainer's ``parameters`` (name, shape) this worker holds, with a checksum.

        Where they live is found at the first call and kept: it follows from the model's loader alone.
        """
        model = self.model_runner.model
        if not hasattr(self, "_weight_layout"):
            self._weight_layout = weight_layout.find_layout(model, [(n, tuple(s)) for n, s in parameters])
        return [one.as_dict() for one in digest.digest_model(model, self._weight_layout)]
