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
from scripts.testing import side_by_side
from scripts.testing.side_by_side import Job, Lanes, parse

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
import sys
from scripts.errors import run
from scripts.testing.side_by_side import Job, Lanes
commands = {"long": ["waits"], "later": ["meets", "never", "never"]}
Job.command = lambda job, again: [sys.executable, "-m", *commands[job.suite]]
run(lambda: Lanes().run([Job("long", "one"), Job("later", "one")], lanes=1))
"""


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Set the commands of suites: modules with this file's texts, and one that fails."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, text in {"meets": MEETS, "waits": WAITS, "fails": "raise SystemExit(3)"}.items():
        tmp_path.joinpath(f"{name}.py").write_text(text, encoding="utf-8")

    def make(**commands: tuple[str, ...]) -> None:
        def command(job: Job, _: bool) -> list[str]:
            return [sys.executable, "-m", *commands[job.suite], job.cell]

        monkeypatch.setattr(side_by_side.Job, "command", command)

    return make


def test_two_run_at_a_time_and_each_line_names_its_suite_and_cell(
    made_up: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of the two waits for the other; one after the other, both would fail."""
    made_up(left=("meets", "left", "right"), right=("meets", "right", "left"))
    lanes = Lanes()
    lanes.run([Job("left", "one"), Job("right", "two")], lanes=2)
    assert [code for _, code, _ in lanes.outcomes] == [0, 0]
    lines = ["left one | met for one", "right two | met for two"]
    assert sorted(capfd.readouterr().out.splitlines()) == lines


def test_the_cell_is_omitted_where_there_is_only_one() -> None:
    jobs = [Job("image", "one"), Job("demo", "one")]
    assert list(side_by_side.labels(jobs).values()) == ["image", "demo"]


def test_a_failure_does_not_stop_the_other_suites(made_up: Callable[..., None]) -> None:
    """The outcome of the failed suite is its exit code."""
    made_up(bad=("fails",), good=("meets", "a", "a"))
    lanes = Lanes()
    lanes.run([Job("bad", "one"), Job("good", "one")], lanes=1)
    assert {job.suite: code for job, code, _ in lanes.outcomes} == {"bad": 3, "good": 0}


def test_an_interrupt_ends_the_running_suite_and_starts_no_other(
    made_up: Callable[..., None], tmp_path: Path
) -> None:
    """The running suite has time to clean up."""
    made_up()
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "long | up\n"
        process.terminate()
        assert process.wait(60) == errors.INTERRUPTED
    assert tmp_path.joinpath("ended well").exists()
    assert not tmp_path.joinpath("never").exists()


def test_words_are_suites_and_cells() -> None:
    """Without a cell the default one is used; the error of a wrong word names the suites."""
    matrix = load()
    assert parse(["cluster", "demo:ray2.9.3-vllm0.4.2-cpu"], matrix) == [
        Job("cluster", matrix.default),
        Job("demo", "ray2.9.3-vllm0.4.2-cpu"),
    ]
    with pytest.raises(UserError, match="'clutser:': no suite 'clutser'; choose from image, layers"):
        parse(["clutser:"], matrix)


def test_each_suite_is_a_command_of_scripts() -> None:
    assert Job("demo", "cell").command(again=False)[1:] == ["-m", "scripts", "demo", "cell"]
    network = ["-m", "scripts", "test", "network", "cell"]
    assert Job("network", "cell").command(again=False)[1:] == network
    assert Job("network", "cell").command(again=True)[1:] == [*network, "--again"]
    assert Job("known-bad", "cell").command(again=True)[1:] == ["-m", "scripts", "known-bad", "cell"]


def test_a_suite_that_is_named_twice_has_two_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a pass would hide a failure."""
    codes = iter([1, 0])
    lanes = Lanes()
    monkeypatch.setattr(lanes, "execute", lambda *_: next(codes))
    lanes.run([Job("image", "one")] * 2, lanes=1)
    assert [code for _, code, _ in lanes.outcomes] == [1, 0]
