"""Numbers that are right: the gradient of every ZeRO stage, and probabilities of engine and trainer."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port

GRADIENT = Path(__file__).with_name("gradient.py")
PROBABILITIES = Path(__file__).with_name("probabilities.py")
WORLD, SECONDS = 2, 300


@pytest.fixture(scope="module")
def norms(tmp_path_factory):
    """The norm of the gradient by stage and accumulation, as each rank has it."""
    port = free_port()
    folder = tmp_path_factory.mktemp("gradient")
    running = [
        subprocess.Popen(
            [sys.executable, str(GRADIENT), str(rank), str(WORLD), str(port)],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=(folder / f"errors{rank}").open("w"),
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    errors = (folder / "errors0").read_text()[-3000:]
    assert [process.returncode for process in running] == [0] * WORLD, errors
    return [json.loads(output.strip().splitlines()[-1]) for output in outputs]


@pytest.mark.timeout(SECONDS + 40)
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_applies_the_gradient_of_the_whole_batch(norms, stage, accumulation):
    """DeepSpeed 0.17.6 to 0.18.2 loses what was accumulated, with ZeRO 2."""
    for rank in norms:
        alone, found = rank["0/0"], rank[f"{stage}/{accumulation}"]
        assert alone > 0.1
        assert math.isclose(found, alone, rel_tol=1e-4), f"{found} is applied, and the gradient is {alone}"


@pytest.mark.carries("openrlhf==0.11.2")
@pytest.mark.timeout(SECONDS)
def test_engine_and_trainer_agree_on_the_probability_of_each_token(tmp_path):
    done = subprocess.run(
        [sys.executable, str(PROBABILITIES), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS - 20,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "probabilities.json").read_text())
    assert len(found["engine"]) == len(found["trainer"]) == 32
    assert len(set(found["engine"])) > 16, "the tokens are not all alike"
    assert max(abs(a - b) for a, b in zip(found["engine"], found["trainer"], strict=True)) < 0.05
    assert abs(sum(found["engine"]) - sum(found["trainer"])) / 32 < 0.01
