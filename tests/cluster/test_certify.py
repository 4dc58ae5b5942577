"""rlhf-stack certify on fake GPUs: a part of the ladder, and all of it in the suite integration."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from processes import END_SECONDS, MARK, marked, still_running
from rlhf_stack.accelerator import devices
from rlhf_stack.certify.ladder import NAMES
from rlhf_stack.certify.model import digest_of

SECONDS = 400
ALL_SECONDS = 2400
PART = ("attention", "network", "lost-rank")
GPU_ALONE = {"streams"}
WITHOUT_SLEEP = {"sleep", "throughput", "train-colocated"}  # OpenRLHF 0.5 and vLLM 0.4 have none of them


@pytest.fixture
def certify(tmp_path):
    """Run the command; return the certificate, the exit code and the folder. Nothing may be left over."""
    folder = tempfile.mkdtemp(prefix="rl")  # short: Ray's sockets are below it
    mark = Path(folder).name
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {MARK: mark, "RAY_TMPDIR": folder, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def run(*arguments, seconds=SECONDS):
        out = tmp_path / "certificate"
        done = subprocess.run(
            [sys.executable, "-m", "rlhf_stack", "certify", "--out", str(out), "--json", *arguments],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.stdout, done.stderr[-3000:]
        printed = json.loads(done.stdout)
        content = json.loads((out / "certificate.json").read_text())
        assert content["digest"] == digest_of(content)
        assert printed["rungs"] == content["rungs"]
        assert [rung["name"] for rung in content["rungs"]] == list(NAMES)
        return {rung["name"]: rung for rung in content["rungs"]}, done.returncode, content

    yield run
    left = still_running(mark, END_SECONDS)
    for number in marked(mark):
        os.kill(number, signal.SIGKILL)
    assert left == []


def reasons(rungs, state):
    return {name: rung["reason"] for name, rung in rungs.items() if rung["state"] == state}


@pytest.mark.timeout(SECONDS + 60)
def test_a_part_of_the_ladder(certify):
    if devices.is_gpu():
        pytest.skip("this image is for GPUs")
    words = [word for name in PART for word in ("--rung", name)]
    rungs, code, content = certify("--fake-gpus", "1,2", *words)
    assert reasons(rungs, "failed") == {}
    assert code == 0
    assert set(reasons(rungs, "passed")) == {"facts", *PART}
    assert set(reasons(rungs, "not climbed").values()) == {"it was not selected"}
    assert sorted(machine["fake_gpus"] for machine in content["machines"]) == [1, 2]


@pytest.mark.integration
@pytest.mark.timeout(ALL_SECONDS + 60)
def test_the_whole_ladder(certify):
    if devices.is_gpu():
        pytest.skip("this image is for GPUs")
    rungs, code, _ = certify(seconds=ALL_SECONDS)
    assert reasons(rungs, "failed") == {}
    assert code == 0
    absent = GPU_ALONE | ({*WITHOUT_SLEEP} if rungs["sleep"]["state"] == "not climbed" else set())
    assert set(reasons(rungs, "not climbed")) == absent
    assert all(rungs[name]["measurements"] for name in NAMES if name not in {*absent, "sleep"})
