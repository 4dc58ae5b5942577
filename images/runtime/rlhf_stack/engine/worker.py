"""vLLM's own worker class of the platform, instrumented: vLLM's argument ``worker_cls``.

Its startup is logged step by step and ends if its engine dies. On request it checks its GPU for contention
before each step of generation.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_stack.accelerator import devices
from rlhf_stack.engine import gpu_contention, parent_death, startup, vllm_v0_29
from rlhf_stack.engine.worker_extension import WorkerMixin
from rlhf_stack.sync import SyncError

if TYPE_CHECKING:
    Base = Any
elif devices.is_gpu():
    from vllm.v1.worker.gpu_worker import Worker as Base
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Base


class InstrumentedWorker(WorkerMixin, startup.InstrumentedStartup, Base):  # type: ignore[misc]
    """A vLLM worker; each method extends upstream's."""

    _contention: gpu_contention.ContentionCheck | None = None

    def init_device(self) -> Any:
        """Initialize the device: the first step of startup."""
        parent_death.set_parent_death_signal()
        return super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        """Warm up: the last step of startup, after which vLLM itself notices the death of its engine."""
        parent_death.clear_parent_death_signal()
        with startup.step("warm", self.rank):
            result = super().compile_or_warm_up_model()
        self._contention = gpu_contention.ContentionCheck()
        return result

    def sleep(self, *arguments: Any, **options: Any) -> Any:
        """Sleep: a later write to the weights, whose memory is unmapped, is an error instead of a crash."""
        result = super().sleep(*arguments, **options)
        self.model_runner.model.load_weights = _refuse_weights
        return result

    def wake_up(self, tags: list[str] | None = None) -> Any:
        """Wake up, or map the memory of ``tags`` alone."""
        result = super().wake_up(tags)
        if tags is None or "weights" in tags:
            vars(self.model_runner.model).pop("load_weights", None)
        return result

    def start_weight_update(self) -> None:
        """Begin a weight update, unless the engine is asleep."""
        if "load_weights" in vars(self.model_runner.model):
            _refuse_weights()
        super().start_weight_update()

    def receive_weights(self, parameters: Sequence[Any], limit: int, encoding: str) -> dict[str, Any]:
        """Receive and load the trainer's ``parameters``; after an error the next sync can begin."""
        transfer = self.weight_transfer_engine
        content = {"parameters": parameters, "limit": limit, "encoding": encoding}
        content["held"] = self.other_dtypes(parameters)
        self.start_weight_update()
        try:
            self.update_weights(content)
            self.finish_weight_update()
        except BaseException:
            self._weight_update_active = False
            transfer.abort_weight_update()
            raise
        report: dict[str, Any] = transfer.report
        return report

    def join_weight_group(self, host: str, port: int, rank_offset: int, world: int, backend: str) -> None:
        """Join the sync group whose rank 0, the trainer, listens on ``host``:``port``."""
        where = {"host": host, "port": port, "rank_offset": rank_offset, "world": world}
        self.init_weight_transfer_engine({**where, "backend": backend})

    def join_weight_sources(self, endpoints: Sequence[tuple[str, int]], rank_offset: int, world: int) -> None:
        """Join the sync groups of further trainer ranks, see `rlhf_stack.sync.sources`."""
        self.weight_transfer_engine.join_sources(endpoints, rank_offset, world)

    def join_same_gpu(self, offers: dict[str, str]) -> None:
        """Join the trainer rank on this worker's GPU; ``offers`` are the ranks' addresses by GPU."""
        self.init_weight_transfer_engine({"offers": offers})

    def leave_weight_group(self) -> None:
        """Leave the sync group, if this worker is in one: it will be formed again."""
        self.weight_transfer_engine.shutdown()

    def rearranged_tensors(self) -> set[str]:
        """Return the names of the tensors that vLLM may have rearranged after loading."""
        return vllm_v0_29.rearranged_tensors(self.model_runner.model)

    def unsent_tensors(self) -> tuple[Collection[str], Collection[str]]:
        """Return the names of tensors that the last sync did not write, and of those that others did."""
        transfer = self.weight_transfer_engine
        return transfer.unsent or frozenset(), transfer.sent_before

    def execute_model(self, *arguments: Any, **options: Any) -> Any:
        """Run one step of generation or of warm-up."""
        if self._contention is not None:
            self._contention.check()
        return super().execute_model(*arguments, **options)


def _refuse_weights(*_: Any, **__: Any) -> None:
    """Take the place of a sleeping model's ``load_weights``."""
    raise SyncError("the engine is asleep and its weights have no memory: call wake_up before a weight sync")
