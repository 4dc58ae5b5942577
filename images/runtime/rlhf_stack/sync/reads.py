"""Which elements of the trainer's parameters the loader of an engine worker reads: those of its shard.

In the first sync every operation that reads a parameter is recorded, with the view that it reads; this
depends on no architecture, and not on where the loader writes. Later syncs copy only these elements into the
worker, at their places in tensors of full shape. An operation that would read any other element is an error.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from rlhf_stack.config import env_vars
from rlhf_stack.lazy import torch
from rlhf_stack.sync.buckets import ParameterSpec
from rlhf_stack.sync.errors import SyncError
from rlhf_stack.sync.load_trace import intercepted, tensors_in
from rlhf_stack.sync.weight_layout import View


@dataclass
class _Source:
    """A storage with parameters, by their first bytes; ``reference`` keeps its address from being reused."""

    reference: Any
    parameters: list[tuple[int, ParameterSpec]]


class Reads:
    """What the loader of one worker has read; it sees what operations of torch read, as vLLM's loaders do."""

    def __init__(self) -> None:
        self._specs: dict[str, ParameterSpec] = {}
        self._seen: dict[ParameterSpec, set[View]] = {}
        self._needed: dict[ParameterSpec, tuple[View, ...]] = {}
        self._sources: dict[int, _Source] = {}  # by the storage's address

    def begin(self, specs: Sequence[ParameterSpec]) -> None:
        """Begin a sync of parameters with ``specs``."""
        self._specs = {spec.name: spec for spec in specs}

    def ended(self) -> None:
        """End a sync that succeeded: the next one needs what was read in this one."""
        self._sources.clear()
        for spec in self._specs.values():
            if spec not in self._needed:
                views = tuple(self._seen.setdefault(spec, set()))
                is_whole = sum(view.count for view in views) >= prod(spec.shape)
                self._needed[spec] = (_everything(spec),) if is_whole else views

    @property
    def is_known(self) -> bool:
        """Whether a sync has succeeded."""
        return bool(self._needed)

    def needed(self, spec: ParameterSpec) -> Sequence[View] | None:
        """Return the elements of a parameter that the loader reads, None if that is unknown."""
        return self._needed.get(spec)

    @contextmanager
    def recorded(self, tensors: Sequence[tuple[str, "torch.Tensor"]] = ()) -> Iterator[None]:
        """Record what is read of ``tensors``, parameters by name, now and until the sync ends.

        `SyncError` if an element is read that was not copied.
        """
        from torch.multiprocessing.reductions import StorageWeakRef

        for name, tensor in tensors:
            if (address := _address(tensor)) not in self._sources:
                self._sources[address] = _Source(StorageWeakRef(tensor.untyped_storage()), [])
            begin = tensor.storage_offset() * tensor.element_size()
            self._sources[address].parameters.append((begin, self._specs[name]))
        with intercepted(self._intercept):
            yield

    def _intercept(self, function: Any, args: Any, kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        read = [each for each in tensors_in((args, kwargs)) if _address(each) in self._sources]
        if read:
            is_written = function._schema.is_mutable
            views = set() if is_written else {_address(each) for each in tensors_in(result)}
            for tensor in read:
                if tensor.numel() and views != {_address(tensor)}:  # a view of it will be read later, or not
                    self._record(tensor)
        return result

    def _record(self, tensor: "torch.Tensor") -> None:
        parameters, size = self._sources[_address(tensor)].parameters, tensor.element_size()
        byte = tensor.storage_offset() * size
        begin, spec = parameters[bisect_right(parameters, byte, key=lambda each: each[0]) - 1]
        if spec.size == size * prod(spec.shape):
            view = View.of(tensor).shifted(-begin // size).simplified()
        else:  # it is read as another dtype
            view = _everything(spec)
        seen, needed = self._seen.setdefault(spec, set()), self._needed.get(spec)
        if view in seen:
            return
        if needed is not None and not _contains(needed, view, prod(spec.shape)):
            raise SyncError(
                f"{spec.name}: the engine's loader reads other elements than in earlier syncs, which were "
                f"not copied: {env_vars.SYNC_SHARDED}=off copies all of them"
            )
        seen.add(view)


def _everything(spec: ParameterSpec) -> View:
    return View(0, (prod(spec.shape),), (1,))


def _contains(views: Sequence[View], other: View, count: int) -> bool:
    """Report whether ``other`` has only elements that are in ``views`` of ``count`` elements."""
    if any(view.count == count for view in views):
        return True
    uncovered = torch.ones(count, dtype=torch.bool)
    for view in views:
        view.mark(uncovered, False)
    return not other.select(uncovered).any()


def _address(tensor: "torch.Tensor") -> int:
    """Return the address of a tensor's storage, also if it has no memory; 0 for a tensor without storage."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else 0
