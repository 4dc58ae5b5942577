"""What the tests of faults read of a run: its placement, repeated work, deadlines, and its nodes' memory."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rlhf_stack.demo.tiny_run import PROMPTS_PER_STEP

from scripts.errors import UserError
from tests.faults import injecting, trial
from tests.faults.once import once
from tests.faults.trial import ENVIRONMENT, generated_again_after

ONCE = """
import sys
from pathlib import Path
from tests.faults.once import once

def compute() -> dict[int, float]:
    print("computes", flush=True)
    sys.stdin.read()
    return {1: 0.5}

print(once(Path(sys.argv[1]), dict[int, float], compute, "the other run"), flush=True)
"""


def test_the_placement_of_an_engine_that_moves_is_not_that_of_the_run() -> None:
    first = {"groups": {"actor": ["10.0.0.2"], "vllm_engine": ["10.0.0.3"]}, "engines": [["10.0.0.3"]]}
    again = {"groups": {"actor": ["10.0.0.4"], "vllm_engine": ["10.0.0.3"]}, "engines": [["10.0.0.3"]]}
    moved = {"groups": {"vllm_engine": ["10.0.0.5"]}, "engines": [["10.0.0.5"]]}
    assert trial.run_placement([first, moved, again, moved]) is again


def generation(time: float) -> Mapping[str, Any]:
    return {"event": "begins", "name": "generation", "time": time}


def step(time: float, number: int) -> Mapping[str, Any]:
    return {"event": "step", "step": number, "time": time}


# Two steps, then the third until a fault at 5.
BEFORE = [generation(1), step(2, 1), generation(3), step(4, 2)]
AFTER = [generation(20), step(21, 4)]


@pytest.mark.parametrize(
    ("since", "during", "generations", "expected"),
    [
        pytest.param(5, [generation(4.5), step(6, 3)], 1, 0, id="nothing again"),
        pytest.param(4.2, [generation(6), step(7, 3)], 1, 0, id="submitted again before the generation"),
        pytest.param(5, [generation(4.5), generation(6), step(7, 3)], 1, 8, id="submitted again"),
        pytest.param(
            5,
            [generation(4.5), generation(6), step(7, 2), generation(8), step(9, 3)],
            1,
            16,
            id="a step lost",
        ),
        pytest.param(
            5,
            [generation(4.5), generation(6), generation(7), step(8, 3)],
            1,
            16,
            id="submitted again twice",
        ),
        pytest.param(
            5,
            [generation(4.5), {"event": "prompts moved", "prompts": 4, "time": 6}, step(7, 3)],
            1,
            4,
            id="an engine lost",
        ),
    ],
)
def test_prompts_that_are_generated_again_are_counted(
    since: float, during: list[Mapping[str, Any]], generations: int, expected: int
) -> None:
    assert generated_again_after([*BEFORE, *during, *AFTER], since, 2, generations) == expected


def test_a_generation_of_each_rank_has_its_part_of_the_prompts() -> None:
    """As in OpenRLHF 0.5, of which one rank may have begun when the run is lost."""
    ended = [generation(1), generation(1), step(2, 1)]
    lost = [generation(3), generation(5), generation(5), step(6, 2)]
    assert generated_again_after([*ended, *lost], 4, 1, 2) == PROMPTS_PER_STEP // 2


def test_a_run_that_uses_its_deadlines_in_turn_does_not_hang() -> None:
    waits = float(trial.SUBMIT[trial.SUBMIT.index("--node-wait") + 1])
    waits += sum(float(ENVIRONMENT[f"RLHF_STACK_{name}_TIMEOUT"]) for name in ("PLACEMENT", "ENGINE"))
    assert waits < trial.HANG_SECONDS
    phase = trial.LASTS_SECONDS + trial.HANG_SECONDS + trial.REACH_SECONDS
    assert 4 * phase + 1200 < trial.TEST_SECONDS


class Node:
    """A fake of a container with a first process."""

    def __init__(self, pid: int) -> None:
        self.attrs = {"State": {"Pid": pid}}

    def reload(self) -> None:
        pass


VERSION_1 = {
    "cgroup": "4:memory:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n",
    "folder": "memory/docker/abc",
    "memory.stat": "cache 500\nrss 10\ntotal_rss 30\ntotal_shmem 12\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
}
VERSION_2 = {
    "cgroup": "0::/system.slice/docker-abc.scope\n",
    "folder": "system.slice/docker-abc.scope",
    "memory.stat": "anon 30\nfile 500\nkernel_stack 2\nshmem 10\n",
    "memory.events": "low 0\nmax 4\noom 3\noom_kill 3\noom_group_kill 0\n",
}


@pytest.mark.parametrize("files", [VERSION_1, VERSION_2], ids=["version 1", "version 2"])
def test_the_memory_of_a_node_is_read_with_both_versions_of_cgroups(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(injecting, "PROC", tmp_path / "proc")
    monkeypatch.setattr(injecting, "CGROUPS", tmp_path / "cgroup")
    process = tmp_path / "proc" / "7"
    process.mkdir(parents=True)
    (process / "cgroup").write_text(files["cgroup"], encoding="utf-8")
    folder = tmp_path / "cgroup" / files["folder"]
    folder.mkdir(parents=True)
    for name in files.keys() - {"cgroup", "folder"}:
        (folder / name).write_text(files[name], encoding="ascii")
    found = injecting.memory_cgroup(Node(7))  # type: ignore[arg-type]
    assert found == folder
    assert injecting.unreclaimable(found) == 42
    assert injecting.kills(found) == 3
    assert injecting.kills(tmp_path / "gone") is None


def test_a_result_that_two_processes_need_is_computed_once(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", ONCE, str(tmp_path / "run")]
    with (
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as first,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as second,
    ):
        assert first.stdout
        assert second.stdout
        lines = {first: first.stdout.readline(), second: second.stdout.readline()}
        assert sorted(lines.values()) == ["computes\n", "waiting for the other run that is already running\n"]
        computes = next(process for process, line in lines.items() if line == "computes\n")
        waits = second if computes is first else first
        assert computes.communicate("")[0] == "{1: 0.5}\n"
        assert waits.communicate("")[0] == "{1: 0.5}\n"


def test_a_result_that_failed_or_cannot_be_read_is_computed_again(tmp_path: Path) -> None:
    def fails() -> int:
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        once(tmp_path, int, fails, "a run")
    assert once(tmp_path, int, lambda: 1, "a run") == 1
    assert once(tmp_path, int, fails, "a run") == 1
    (tmp_path / "result.json").write_text("cut", encoding="utf-8")
    assert once(tmp_path, int, lambda: 2, "a run") == 2
