"""A user who installs a package over ours is told: in the log of a run, and when a container starts."""

import os
import subprocess

import pytest

PROBE = """
import logging

pretend_flash_attn()
import openrlhf.cli.train_ppo_ray as train_ppo_ray

# As if it had been installed anew: its record is found first, and no files.
record = Path("replaced", "openrlhf-1.dist-info", "METADATA")
record.parent.mkdir(parents=True)
record.write_text("Metadata-Version: 2.1\\nName: openrlhf\\nVersion: 1\\n")
sys.path.insert(0, str(Path("replaced").resolve()))
told = []
logging.getLogger("rlhf_stack").addHandler(types.SimpleNamespace(level=0, handle=told.append))


class Begun(Exception):
    pass


def stop(*_, **__):
    raise Begun


train_ppo_ray._validate_args = lambda _: None
train_ppo_ray.get_strategy = stop
train_ppo_ray.ray = types.SimpleNamespace(is_initialized=lambda: True)
try:
    train_ppo_ray.train(types.SimpleNamespace())
except Begun:
    pass
told = [found.getMessage() for found in told]
found = [line for line in told if line.startswith("openrlhf 1 is not this image's")]
assert found, f"a run says nothing of it: {told}"
print("a run tells that openrlhf was replaced")
"""


def test_a_run_tells_of_a_package_that_was_replaced(proves):
    proves(PROBE, "a run says nothing of it")


@pytest.mark.timeout(120)
def test_a_container_that_starts_tells_of_packages_that_were_replaced():
    """With the packages as released first on the path, which pip would have put in place of ours."""
    pristine = os.environ["RLHF_STACK_PRISTINE"]
    done = subprocess.run(
        ["rlhf-entrypoint", "sh", "-c", "exit 7"],
        env=os.environ | {"PYTHONPATH": pristine},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (7, "")
    assert "rlhf-stack: openrlhf " in done.stderr
    assert "rlhf-stack patches shows all" in done.stderr
