"""vLLM's own worker of the platform, whose start is told step by step: vLLM's argument ``worker_cls``."""

from typing import TYPE_CHECKING, Any

from rlhf_stack import devices, starting

if TYPE_CHECKING:
    Base = Any
elif devices.is_gpu():
    from vllm.v1.worker.gpu_worker import Worker as Base
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as Base


class ToldWorker(starting.ToldStart, Base):  # type: ignore[misc]
    """Each method is upstream's."""

    def compile_or_warm_up_model(self) -> Any:
        """The last step of a worker."""
        with starting.step("warm", self.rank):
            return super().compile_or_warm_up_model()
