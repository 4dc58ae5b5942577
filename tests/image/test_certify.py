"""rlhf-stack certify in an image for GPUs on a machine without one: nothing is climbed, with the reason."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from rlhf_stack.certify.ladder import NAMES
from rlhf_stack.certify.model import NOT_CLIMBED, PASSED, digest_of
from rlhf_stack.config import env_vars

SECONDS = 240  # for what takes less than a minute on a quiet machine: Ray starts, one rung is climbed
REASON = "this image is for GPUs, and no node has one that its driver shows"


@pytest.mark.skipif(env_vars.accelerator() == "cpu", reason="for GPUs, which this cell does not have")
@pytest.mark.timeout(SECONDS + 30)
def test_no_rung_is_climbed_without_a_gpu(tmp_path: Path) -> None:
    """The certificate has the facts, and each other rung as not climbed with the reason; none fails."""
    with tempfile.TemporaryDirectory(prefix="rl", ignore_cleanup_errors=True) as folder:  # Ray's sockets
        done = subprocess.run(
            ["rlhf-stack", "certify", "--out", str(tmp_path / "certificate"), "--json"],
            env=os.environ | {"RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads((tmp_path / "certificate" / "certificate.json").read_text())
    found = {rung["name"]: (rung["state"], rung["reason"]) for rung in content["rungs"]}
    assert found == {name: (PASSED, "") if name == "facts" else (NOT_CLIMBED, REASON) for name in NAMES}
    assert content["digest"] == digest_of(content)
    assert content["subject"]["inputs"] == os.environ[env_vars.INPUTS]
    (machine,) = content["machines"]
    assert (machine["gpus"], machine["fake_gpus"]) == (0, 0)
