"""Calls of a rank of upstream's class, of whose first one Ray loses the answer."""

import pytest

CALLS = """
LOST = {"num_failures": 1, "resp_failure_prob": 100}
os.environ["RAY_testing_rpc_failure"] = json.dumps({"CoreWorkerService.grpc_client.PushTask": LOST})
import ray

from openrlhf.trainer.ray import launcher

own_ray(num_cpus=2, num_gpus=1)


@ray.remote
class Policy(launcher.BaseModelActor):
    steps = 0

    def train(self):
        self.steps += 1
        return self.steps


group = launcher.RayActorGroup(1, 1, Policy)
steps = [ray.get(group.async_run_method("train")) for _ in range(3)]
assert steps == [[1], [2], [3]], steps
print("each step was trained once")
ray.shutdown()
"""


@pytest.mark.patch("openrlhf/0.11.2/0058-repeat-calls-of-actors")
@pytest.mark.timeout(400)
def test_a_call_whose_answer_is_lost_is_repeated_and_executed_once(proves):
    proves(CALLS, r"ray\.exceptions\.ActorUnavailableError")
