"""OpenRLHF's trainer as the driver of a job on the Ray cluster at ADDRESS.

driver.py ADDRESS [ARGUMENT...]: the arguments are the trainer's. RLHF_STACK_TEST_HOOK names a function that
each worker process calls first.
"""

import os
import runpy
import sys

import ray

HOOK = "RLHF_STACK_TEST_HOOK"


def main() -> None:
    """Run the trainer; its error ends this process."""
    _, address, *arguments = sys.argv
    hook = os.environ.get(HOOK)
    ray.init(address=address, runtime_env={"worker_process_setup_hook": hook} if hook else None)
    sys.argv = ["train_ppo_ray", *arguments]
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")


if __name__ == "__main__":
    main()
