"""A package installed over the patched one is reported: in the log of a run, and when a container starts."""

import os
import subprocess

import pytest

PROBE = """
import logging

import openrlhf.cli.train_ppo_ray as train_ppo_ray

# As if it had been reinstalled: its metadata is found first, and no files.
record = Path("replaced", "openrlhf-1.dist-info", "METADATA")
record.parent.mkdir(parents=True)
record.write_text("Metadata-Version: 2.1\\nName: openrlhf\\nVersion: 1\\n")
sys.path.insert(0, str(Path("replaced").resolve()))
logged = []
logging.getLogger("rlhf_stack").addHandler(types.SimpleNamespace(level=0, handle=logged.append))


class Begun(Exception):
    pass


def stop(*_, **__):
    raise Begun


running = stub("a Ray that runs", is_initialized=lambda: True)
replace(train_ppo_ray, _validate_args=lambda _: None, get_strategy=stop, ray=running)
try:
    train_ppo_ray.train(types.SimpleNamespace())
except Begun:
    pass
lines = [record.getMessage() for record in logged]
found = [line for line in lines if line.startswith("openrlhf 1 is not this image's")]
assert found, f"a run does not report it: {lines}"
print("a run reports that openrlhf was replaced")
"""


@pytest.mark.patch(
    "openrlhf/0.11.2/0035-warn-of-replaced-packages", "openrlhf/0.5.1/0034-warn-of-replaced-packages"
)
def test_a_run_reports_a_replaced_package(proves):
    proves(PROBE, "a run does not report it")


@pytest.mark.timeout(240)
def test_a_starting_container_reports_replaced_packages(tmp_path):
    """Other metadata is first on the path, as if pip had installed it over the patched package."""
    metadata = tmp_path / "openrlhf-1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: openrlhf\nVersion: 1\n", encoding="utf-8")
    done = subprocess.run(
        ["rlhf-entrypoint", "sh", "-c", "exit 7"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (7, "")
    assert "rlhf-stack: openrlhf 1 is not this image's" in done.stderr
    assert "(see rlhf-stack patches)" in done.stderr
