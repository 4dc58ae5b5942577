"""Methods that this distribution adds to vLLM workers, and the worker class of vLLM 0.4."""

import importlib
import os
import socket
import traceback
from collections.abc import Collection, Sequence
from typing import Any

from rlhf_stack.accelerator import devices
from rlhf_stack.engine import startup
from rlhf_stack.lazy import ray, torch
from rlhf_stack.sync import SyncError, digest, weight_layout
from rlhf_stack.sync.receiving import receive

FAILURE = "rlhf_stack_failure"  # the key of an answer that is an error: its type, if no `SyncError`, and text
WORKERS = {"cuda": ("vllm.worker.worker", "Worker"), "cpu": ("vllm.worker.cpu_worker", "CPUWorker")}


def worker_class() -> Any:
    """Return a subclass of vLLM 0.4's worker on this accelerator, with `WorkerMixin` and reported startup."""
    module, name = WORKERS[devices.device_type()]
    bases = (WorkerMixin, startup.InstrumentedStartup, getattr(importlib.import_module(module), name))
    return type("InstrumentedWorker", bases, {})


def use_worker_class(replacement: type) -> None:
    """Make vLLM 0.4 create an engine's only worker from ``replacement``, a subclass of `worker_class`."""
    module, name = WORKERS[devices.device_type()]
    setattr(importlib.import_module(module), name, replacement)


def own_node() -> dict[str, Any]:
    """Return address (``node``) and id (``node_id``) of the node of this process, a Ray actor."""
    return {"node": ray.util.get_node_ip_address(), "node_id": ray.get_runtime_context().get_node_id()}


def failure_in(answers: Sequence[Any]) -> Exception | None:
    """Return the first error among the answers of the ranks to `WorkerMixin.answer`, None without one."""
    for answer in answers:
        if isinstance(answer, dict) and FAILURE in answer:
            name, text = answer[FAILURE]
            return RuntimeError(f"{name}: {text}") if name else SyncError(text)
    return None


class WorkerMixin:
    """A base of a vLLM worker, with the model in ``self.model_runner``."""

    model_runner: Any
    model_config: Any
    _model_update_group: Any
    _weight_layout: weight_layout.Layout
    _rearranged: dict[str, set[str]]

    def answer(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method of this worker, or its error as `failure_in` finds it.

        vLLM 0.29 takes the answers of the ranks one after the other and stops at the first error: the next
        call would get the answers of the other ranks to this one.
        """
        try:
            return getattr(self, method)(*arguments)
        except Exception as error:
            if not isinstance(error, SyncError):
                traceback.print_exc()
            name = "" if isinstance(error, SyncError) else type(error).__name__
            return {FAILURE: [name, str(error)]}

    def where(self) -> dict[str, Any]:
        """Return rank in the engine, GPU, host name and process id, and the node if this is a Ray actor."""
        location: dict[str, Any] = {
            "rank": torch.distributed.get_rank(),
            "gpu": devices.physical_gpu_id(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        if ray.is_initialized():  # a Ray actor, and not a child process of one
            location |= own_node()
        return location

    def receive_weights(self, parameters: Sequence[Any], limit: int, encoding: str) -> dict[str, Any]:
        """Receive and load the trainer's ``parameters``; see `rlhf_stack.sync.receiving`."""
        group, load = self._model_update_group, self.model_runner.model.load_weights
        where, held = devices.torch_device(), self.other_dtypes(parameters)
        return receive([group], parameters, limit, where, load, self.model_config.dtype, encoding, held=held)

    def other_dtypes(self, parameters: Sequence[Any]) -> dict[str, str]:
        """Return the dtypes of the trainer's ``parameters`` that it holds in them, instead of its own."""
        return weight_layout.other_dtypes(self.model_runner.model, parameters, self.model_config.dtype)

    def leave_weight_group(self) -> None:
        """Leave the sync group, if this worker is in one: it will be formed again."""
        group, self._model_update_group = getattr(self, "_model_update_group", None), None
        if group is not None:
            group.close()

    def rearranged_tensors(self) -> set[str]:
        """Return the names of the tensors that do not hold what was loaded.

        In vLLM 0.4 they are Gemma's norms, to which its loader adds 1.
        """
        model = self.model_runner.model
        if type(model).__name__ != "GemmaForCausalLM":
            return set()
        return {name for name, _ in model.named_parameters() if name.endswith("norm.weight")}

    def unsent_tensors(self) -> tuple[Collection[str], Collection[str]]:
        """Return the names of tensors that the last sync did not write, and of those that others did.

        vLLM 0.4 reports neither.
        """
        return set(), set()

    def weight_digests(self, parameters: Sequence[tuple[str, list[int]]]) -> dict[str, Any]:
        """Return digests of the elements of the trainer's ``parameters`` (name, shape) in this worker.

        ``digests`` are of what this worker holds, ``rearranged`` names parameters that are in tensors with
        another layout than the loader's, and ``stale`` parameters in tensors that the last sync did not
        write, and such tensors that an earlier sync wrote. The layout is found on the first call and cached,
        because it depends on the model's loader only.
        """
        model = self.model_runner.model
        if not hasattr(self, "_weight_layout"):
            named = [(name, tuple(shape)) for name, shape in parameters]
            self._weight_layout, self._rearranged = weight_layout.comparable_layout(
                model, named, self.rearranged_tensors()
            )
        digests = [part.as_dict() for part in digest.digest_model(model, self._weight_layout)]
        unsent, sent_before = self.unsent_tensors()
        stale = {each.name for each in self._weight_layout if each.tensor in unsent}
        stale |= {name for name, tensors in self._rearranged.items() if not tensors.isdisjoint(unsent)}
        stale |= set(unsent).intersection(sent_before)
        return {"digests": digests, "rearranged": list(self._rearranged), "stale": sorted(stale)}
