"""The worker of images for GPUs, a subclass of vLLM's own: its signatures, its sleep, and failed updates."""

import importlib.util
import inspect
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from rlhf_stack.config import env_vars  # noqa: E402
from rlhf_stack.sync import SyncError  # noqa: E402

pytestmark = pytest.mark.carries("openrlhf==0.11.2")


@pytest.fixture
def kind():
    """The class of workers that an image for GPUs has."""
    spec = importlib.util.find_spec("rlhf_stack.engine.worker")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv(env_vars.ACCELERATOR, "cuda")
        spec.loader.exec_module(module)
    return module.InstrumentedWorker


class Calls(list):
    """Takes the place of an object: notes the calls of its methods, of which one may fail."""

    failing = ""

    def __getattr__(self, name):
        def call(*arguments):
            self.append((name, *arguments))
            if name == self.failing:
                raise ValueError(name)

        return call


@pytest.fixture
def worker(kind, monkeypatch):
    """A worker with a model, whose memory and weight transfer note what is done with them."""
    from vllm.v1.worker import gpu_worker

    monkeypatch.setattr(gpu_worker, "set_current_vllm_config", nullcontext)  # one needs a known platform
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (500, 1000))
    made = kind.__new__(kind)
    made.vllm_config = None
    made.model_runner = SimpleNamespace(model=torch.nn.Linear(2, 2))
    made.model_config = SimpleNamespace(dtype=torch.float32)
    made.memory, made.weight_transfer_engine = Calls(), Calls()
    made._get_sleep_mode_backend = lambda: made.memory
    made._sleep_saved_buffers, made._sleep_saved_draft_buffers = {}, {}
    made._weight_update_active = made._weight_update_is_draft = False
    made.synchronize_device = lambda: None
    return made


def test_each_method_takes_what_that_of_vllm_takes(kind):
    from vllm.v1.worker.gpu_worker import Worker

    assert issubclass(kind, Worker)
    extended = [name for name in vars(kind) if not name.startswith("_") and hasattr(Worker, name)]
    assert {"init_device", "compile_or_warm_up_model", "sleep", "wake_up", "execute_model"} <= set(extended)
    for name in extended:
        parameters = [each for each in inspect.signature(getattr(Worker, name)).parameters if each != "self"]
        inspect.signature(getattr(kind, name)).bind("self", **dict.fromkeys(parameters))


def test_a_sleeping_worker_refuses_weights_until_they_have_memory(worker):
    worker.sleep(1)
    worker.wake_up(["kv_cache"])
    with pytest.raises(SyncError, match="asleep"):
        worker.start_weight_update()
    with pytest.raises(SyncError, match="asleep"):
        worker.model_runner.model.load_weights([])
    worker.wake_up(["weights"])
    worker.start_weight_update()
    assert worker.memory == [("suspend", 1), ("resume", ["kv_cache"]), ("resume", ["weights"])]
    assert worker._weight_update_active


@pytest.mark.parametrize("failing", ["start_weight_update", "update_weights", "finish_weight_update"])
def test_after_a_failed_update_the_next_one_can_begin(worker, failing):
    worker.weight_transfer_engine.failing = failing
    with pytest.raises(ValueError, match=failing):
        worker.receive_weights([], 8, "full")
    worker.weight_transfer_engine.failing = ""
    worker.start_weight_update()
    aborted = ("abort_weight_update",) in worker.weight_transfer_engine
    assert aborted == (failing != "start_weight_update")
