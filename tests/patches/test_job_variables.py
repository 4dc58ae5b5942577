"""Variables of a job that OpenRLHF passes to its actors too."""

import pytest

STARTED = """
import ray
from openrlhf.cli import train_ppo_ray

os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps({"runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO"}}})
os.environ["NCCL_DEBUG"] = "INFO"  # as Ray sets it for the job's driver
real = ray.init
small = {"address": "local", "include_dashboard": False, "num_cpus": 1, "object_store_memory": 100 << 20}


def strategy(arguments):
    print("the run starts with", ray.get_runtime_context().runtime_env["env_vars"]["NCCL_DEBUG"], flush=True)
    ray.shutdown()
    os._exit(0)


replace(ray, init=lambda **given: patiently(lambda: real(**small, **given)))
replace(train_ppo_ray, get_strategy=strategy)
train_ppo_ray.train(types.SimpleNamespace())
"""


@pytest.mark.patch("openrlhf/0.11.2/0062-accept-the-jobs-variables")
def test_a_job_may_set_a_variable_that_the_run_sets(proves):
    proves(STARTED, "Failed to merge the Job's runtime env")
