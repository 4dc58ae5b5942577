"""What this distribution adds to OpenRLHF's engine actor and to the vLLM workers behind it."""

import os
import socket
from collections.abc import Sequence
from typing import Any

from rlhf_stack import checksum, devices, settings
from rlhf_stack.repeatable import RequestSeeds


class EngineHooks:
    """A base of ``RolloutRayActor``, which drives one vLLM engine in ``self.llm``."""

    llm: Any
    kwargs: dict[str, Any]
    _request_seeds: RequestSeeds

    def request_parameters(self, tokens: Sequence[int], parameters: Any) -> Any:
        """vLLM's ``SamplingParams`` for one request, with a seed of its own if runs have to be repeatable."""
        if settings.flag(settings.REPEATABLE) and parameters.seed is None:
            if not hasattr(self, "_request_seeds"):
                self._request_seeds = RequestSeeds(self.kwargs["seed"])
            parameters.seed = self._request_seeds.next(tokens)
        return parameters

    async def call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """The results of a method of `WorkerHooks` in each worker of this engine, by rank."""
        results: list[Any] = await self.llm.collective_rpc(method, args=arguments)
        return results

    async def where(self) -> list[dict[str, Any]]:
        """`WorkerHooks.where` of each worker; child processes of this actor are on its own node."""
        import ray

        own = {"node": ray.util.get_node_ip_address(), "node_id": ray.get_runtime_context().get_node_id()}
        return [own | worker for worker in await self.call_workers("where")]


class WorkerHooks:
    """A base of ``WorkerWrap``, which vLLM mixes into its worker class."""

    model_runner: Any
    _weight_layout: checksum.Layout

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
            answer["node"] = ray.util.get_node_ip_address()
            answer["node_id"] = ray.get_runtime_context().get_node_id()
        return answer

    def weight_pieces(self, parameters: Sequence[tuple[str, list[int]]]) -> list[dict[str, Any]]:
        """Which elements of the trainer's ``parameters`` (name, shape) this worker holds, with a checksum.

        Where they live is found at the first call and kept: it follows from the model's loader alone.
        """
        model = self.model_runner.model
        if not hasattr(self, "_weight_layout"):
            self._weight_layout = checksum.find_layout(model, [(n, tuple(s)) for n, s in parameters])
        return [piece.as_dict() for piece in checksum.held_pieces(model, self._weight_layout)]
