import pytest

# A trainer and two engines that only record their calls; tests/cluster checks that weights arrive.
PROBE = """
import contextlib

import torch

import ray
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from rlhf_stack.sync.encoding import Encodings
from rlhf_stack.telemetry.throughput import Work

alone()
calls, sent = [], []


def method(name):
    return stub("an engine, which records its calls", remote=lambda *_, **__: calls.append(name))


@stub("the sync group")
class Group:
    name, device, answers, in_place, kept = "gloo", torch.device("cpu"), {}, True, None
    encodings = Encodings(0, "off")

    class buffers:
        for_bucket = staticmethod(lambda size, number: torch.empty(size, dtype=torch.uint8))

    def broadcast(self, tensor, src, stream):
        sent.append(tensor)

    def start(self, parts, what):
        sent.extend(parts)
        return stub("a transfer", finish=lambda: None)

    def syncing(self, watch):
        return contextlib.nullcontext()


def engine():
    return types.SimpleNamespace(**{name: method(name) for name in ("update_weight", "receive_weights")})


class Trainer(ActorPPOTrainer):
    def __init__(self):
        layers = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, dtype=torch.bfloat16) for _ in range(5)])
        sections = {name: types.SimpleNamespace() for name in ("vllm", "ds", "data")}
        arguments = types.SimpleNamespace(zero_stage=2, **sections)
        arguments.ds.zero_stage, arguments.ds.tensor_parallel_size = 2, 1
        self.actor = types.SimpleNamespace(model=types.SimpleNamespace(module=layers))
        self.strategy = types.SimpleNamespace(args=arguments)
        self.use_cuda_ipc = False
        self.vllm_engines = [engine(), engine()]
        self._model_update_group = Group()


DEVICE_CALLS = ("current_stream", "empty_cache", "ipc_collect", "synchronize")
replace(torch.cuda, **dict.fromkeys(DEVICE_CALLS, lambda: None))
replace(ray, get=lambda references, **_: [{"ranks": [], "work": Work(0, 1.0)} for _ in references])
trainer = Trainer()
send = getattr(trainer, "broadcast_to_vllm", None) or trainer._broadcast_to_vllm
send()
parameters = list(trainer.actor.model.module.parameters())
size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
assert sum(part.numel() * part.element_size() for part in sent) == size, "all bytes once"
assert len(calls) == 2, f"{len(calls)} calls to 2 engines for {len(parameters)} parameters"
print("one call to each engine for", len(parameters), "parameters")
"""


@pytest.mark.parametrize(
    "release",
    [
        pytest.param("0.11", marks=pytest.mark.patch("openrlhf/0.11.2/0050-sync-weights")),
        pytest.param("0.5", marks=pytest.mark.patch("openrlhf/0.5.1/0020-send-weights-in-buckets")),
    ],
)
def test_an_engine_is_called_once_per_sync_and_not_per_parameter(proves, release):
    proves(PROBE, "20 calls to 2 engines for 10 parameters")
