"""vLLM's own worker class of the platform, instrumented: vLLM's argument ``worker_cls``.

Its startup is logged step by step and ends if its engine dies. On request it checks its GPU for contention
before each step of generation.
"""

from typing import TYPE_CHECKING, Any

from rlhf_stack.accelerator import devices
from rlhf_stack.engine import gpu_contention, parent_death, startup
from rlhf_stack.sync import SyncError

if TYPE_CHECKING:
    Base = Any
elif devices.is_gpu():
    from vllm.v1.worker.gpu_worker import Worker as Base
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Base


class InstrumentedWorker(startup.InstrumentedStartup, Base):  # type: ignore[misc]
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

    def execute_model(self, *arguments: Any, **options: Any) -> Any:
        """Run one step of generation or of warm-up."""
        if self._contention is not None:
            self._contention.check()
        return super().execute_model(*arguments, **options)


def _refuse_weights(*_: Any, **__: Any) -> None:
    """Take the place of a sleeping model's ``load_weights``."""
    raise SyncError("the engine is asleep and its weights have no memory: call wake_up before a weight sync")
