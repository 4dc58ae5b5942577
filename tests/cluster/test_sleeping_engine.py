"""A weight sync of a sleeping engine is refused: on a GPU its weights have no memory."""

from types import SimpleNamespace

import pytest
import torch
from rlhf_stack.sync import SyncError

pytestmark = pytest.mark.carries("openrlhf==0.11.2")  # vLLM 0.4 has no sleep mode


class Model(torch.nn.Module):
    """Records the names of the weights that it loads."""

    def __init__(self):
        super().__init__()
        self.loaded = []

    def load_weights(self, weights):
        self.loaded += [name for name, _ in weights]


@pytest.fixture
def worker(monkeypatch):
    """A worker of this image, whose base class puts nothing to sleep."""
    from rlhf_stack.engine import worker as module

    for name in ("sleep", "wake_up"):
        monkeypatch.setattr(module.Base, name, lambda *_, **__: None)
    found = module.InstrumentedWorker.__new__(module.InstrumentedWorker)
    found.model_runner = SimpleNamespace(model=Model())
    return found


@pytest.mark.parametrize("tags", [None, ["weights"], ["weights", "kv_cache"]])
def test_weights_load_before_sleep_and_after_it_but_not_in_between(worker, tags):
    model = worker.model_runner.model
    model.load_weights([("before", None)])
    worker.sleep(level=1)
    with pytest.raises(SyncError, match=r"the engine is asleep .* call wake_up before a weight sync"):
        model.load_weights([("asleep", None)])
    worker.wake_up(tags)
    model.load_weights([("after", None)])
    assert model.loaded == ["before", "after"]


def test_a_cache_that_is_awake_alone_takes_no_weights(worker):
    worker.sleep()
    worker.wake_up(["kv_cache"])
    with pytest.raises(SyncError, match="asleep"):
        worker.model_runner.model.load_weights([])
