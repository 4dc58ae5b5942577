"""Suites that run side by side, as processes of their own."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import errors
from scripts.errors import UserError
from scripts.matrix.load import load
from scripts.paths import ROOT
from scripts.testing import suites
from scripts.testing.suites import Job, Lanes, parse

MEETS = """
import sys, time
from pathlib import Path
folder = Path(__file__).parent
folder.joinpath(sys.argv[1]).touch()
deadline = time.monotonic() + 30
while not folder.joinpath(sys.argv[2]).exists():
    assert time.monotonic() < deadline, "alone"
    time.sleep(0.01)
print("met for", sys.argv[3])
"""
WAITS = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
try:
    print("up", flush=True)
    time.sleep(60)
finally:
    Path(__file__).with_name("ended well").touch()
"""
INTERRUPTED = """
from scripts.testing import suites
from scripts.errors import run
never = (("meets", "never", "never"),)
suites.COMMANDS = {"long": (("waits",), *never), "later": never}
suites.LANES = 1
run(suites.main)
"""


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Make suites of commands that are modules: those of this file's texts, and one that fails."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, text in {"meets": MEETS, "waits": WAITS, "fails": "raise SystemExit(3)"}.items():
        tmp_path.joinpath(f"{name}.py").write_text(text, encoding="utf-8")

    def make(**commands: tuple[tuple[str, ...], ...]) -> None:
        monkeypatch.setattr(suites, "COMMANDS", commands)

    return make


def test_two_run_at_a_time_and_each_line_says_whose_it_is(
    made_up: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of the two waits for the other; one after the other, both would fail."""
    made_up(left=(("meets", "left", "right"),), right=(("meets", "right", "left"),))
    lanes = Lanes()
    lanes.run([Job("left", "one"), Job("right", "two")], lanes=2)
    assert [code for code, _ in lanes.outcomes.values()] == [0, 0]
    assert sorted(capfd.readouterr().out.splitlines()) == ["left | met for one", "right | met for two"]


def test_after_a_failure_the_rest_is_run(made_up: Callable[..., None]) -> None:
    """Of a suite of two commands and of the suites: what failed is told by its exit code."""
    made_up(bad=(("fails",), ("meets", "a", "a")), good=(("meets", "b", "a"),))
    lanes = Lanes()
    lanes.run([Job("bad", "one"), Job("good", "one")], lanes=1)
    assert {job.suite: code for job, (code, _) in lanes.outcomes.items()} == {"bad": 3, "good": 0}


def test_interrupted_it_ends_what_runs_and_starts_no_more(
    made_up: Callable[..., None], tmp_path: Path
) -> None:
    """The suite that runs has the time to end in its own way."""
    made_up()
    command = [sys.executable, "-c", INTERRUPTED, "long", "later"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "long | up\n"
        process.terminate()
        assert process.wait(60) == errors.INTERRUPTED
    assert tmp_path.joinpath("ended well").exists()
    assert not tmp_path.joinpath("never").exists()


def test_words_are_suites_and_cells() -> None:
    """Without a cell the default one is meant; what is no suite is named with those there are."""
    assert parse(["cluster", "demo:ray2.9.3-vllm0.4.2-cpu"]) == [
        Job("cluster", load().default),
        Job("demo", "ray2.9.3-vllm0.4.2-cpu"),
    ]
    with pytest.raises(UserError, match="'clutser:' begins with no suite: choose from image, cluster"):
        parse(["clutser:"])
