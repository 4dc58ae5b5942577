"""vLLM's own worker of the platform: vLLM's argument ``worker_cls``.

Its start is told step by step, and ends if its engine dies; on request it looks at its GPU before each step
of generation.
"""

from typing import TYPE_CHECKING, Any

from rlhf_stack.accelerator import devices
from rlhf_stack.engine import gpu_contention, parent_death, startup

if TYPE_CHECKING:
    Base = Any
elif devices.is_gpu():
    from vllm.v1.worker.gpu_worker import Worker as Base
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Base


class ToldWorker(startup.ToldStart, Base):  # type: ignore[misc]
    """Each method is upstream's."""

    _gpu: gpu_contention.Watch | None = None

    def init_device(self) -> Any:
        """The first step of a worker."""
        parent_death.tie()
        return super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        """The last step of a worker; from here on it sees by itself that its engine has died."""
        parent_death.untie()
        with startup.step("warm", self.rank):
            found = super().compile_or_warm_up_model()
        self._gpu = gpu_contention.Watch()
        return found

    def execute_model(self, *arguments: Any, **options: Any) -> Any:
        """One step of generation, or of warming up."""
        if self._gpu is not None:
            self._gpu.check()
        return super().execute_model(*arguments, **options)
