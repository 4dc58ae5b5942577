"""The ladder goes on after a rung that fails, hangs, dies or is not climbed; its records add up."""

import dataclasses
import json
import signal
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.certify import certificate, climb, facts, ladder, on_cluster
from rlhf_stack.certify.certificate import FILE, RECORDS
from rlhf_stack.certify.ladder import LADDER, NAMES, Place, Step
from rlhf_stack.certify.model import (
    FAILED,
    NOT_CLIMBED,
    PASSED,
    Machine,
    Measurement,
    Record,
    Subject,
    digest_of,
    worst,
)
from rlhf_stack.cli.main import main
from rlhf_stack.cluster import connect
from rlhf_stack.config import env_vars

RUNGS = """
import os, subprocess, sys, time
from rlhf_stack.certify.ladder import Found, NotClimbedError
from rlhf_stack.certify.model import Measurement

def passes(place):
    print("output of the rung")
    return Found([Measurement("rate", 2.0, "GB/s")], {"folder": place.folder})

def wrong(place):
    return Found([], {}, "other bytes")

def raises(place):
    raise ValueError("first line\\nsecond line")

def stays(place):
    raise NotClimbedError("no GPU")

def hangs(place):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "rung child", place.folder])
    time.sleep(600)

def dies(place):
    os.kill(os.getpid(), 9)

def interrupts(place):
    os.kill(os.getppid(), 15)
    time.sleep(600)
"""
STEPS = ("passes", "wrong", "raises", "stays", "hangs", "dies")
DEADLINE = 5.0


@pytest.fixture(autouse=True)
def image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, "cpu")


@pytest.fixture
def rungs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A ladder of rungs that end in each way, which the process of a rung finds too."""
    (tmp_path / "rungs_of_test.py").write_text(RUNGS, encoding="utf-8")
    steps = tuple(Step(name, f"it {name}", "gpu", f"rungs_of_test:{name}", DEADLINE) for name in STEPS)
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, [str(tmp_path), *sys.path])))
    for module in (climb, certificate):
        monkeypatch.setattr(module, "LADDER", steps)
    return Place("", str(tmp_path), small=True)


def test_every_rung_is_recorded_however_it_ends(rungs: Place, tmp_path: Path) -> None:
    out, shown = tmp_path / "out", list[str]()

    def report(step: Step, record: Record | None) -> None:
        shown.append(certificate.line(step, record))

    found = certificate.certify(rungs, STEPS, Subject("cell", "1", "a" * 64), [Machine(1)], out, report)
    states = {rung.name: (rung.state, rung.reason) for rung in found.rungs}
    assert states == {
        "passes": (PASSED, ""),
        "wrong": (FAILED, "other bytes"),
        "raises": (FAILED, "ValueError: first line"),
        "stays": (NOT_CLIMBED, "no GPU"),
        "hangs": (FAILED, "not done after 5 s"),
        "dies": (FAILED, "its process ended with code -9"),
    }
    left = [
        line
        for file in Path("/proc").glob("[0-9]*/cmdline")
        if "rung child" in (line := file.read_bytes().decode(errors="replace")) and str(tmp_path) in line
    ]
    assert left == [], "children of a rung that hung still run"
    record = json.loads((out / RECORDS / "passes.json").read_text())
    assert record["log"] == "output of the rung\n"
    assert record["measurements"] == [{"name": "rate", "value": 2.0, "unit": "GB/s"}]
    content = json.loads((out / FILE).read_text())
    assert content["digest"] == digest_of(content)
    assert shown[0] == "passes: it passes (at most 5 s)"
    assert "rate 2 GB/s" in shown[1]
    assert "other bytes" in shown[3]


@pytest.mark.usefixtures("rungs")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_signal_ends_the_climb_with_the_certificate_of_what_was_climbed(
    log_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(env_vars.LOG_FORMAT, log_format)
    names = ("passes", "interrupts", "hangs")
    for module in (climb, certificate):
        steps = tuple(Step(name, name, "gpu", f"rungs_of_test:{name}", 60.0) for name in names)
        monkeypatch.setattr(module, "LADDER", steps)
    monkeypatch.setattr(ladder, "NAMES", ("facts", *names))
    monkeypatch.setattr(on_cluster, "cluster", lambda *_: nullcontext(""))
    monkeypatch.setattr(on_cluster, "remove", lambda _: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["certify", "--out", str(tmp_path / "out"), "--json"]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    output, errors = capsys.readouterr()
    assert not [line for line in errors.splitlines() if log_format == "json" and not json.loads(line)]
    printed = json.loads(output)  # one object, not also that of an error
    assert (printed["passed"], printed["not_climbed"]) == (1, 2)
    content = json.loads((tmp_path / "out" / FILE).read_text())
    assert [rung["reason"] for rung in content["rungs"]] == ["", climb.INTERRUPTED, climb.INTERRUPTED]


def test_a_cluster_that_does_not_answer_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the next attempt would be refused, to protect a certificate that does not exist."""
    monkeypatch.setattr(connect, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        assert main(["certify", "--ray", "127.0.0.1:1", "--out", str(tmp_path / "out")]) == 2
        assert "no head answers at 127.0.0.1:1" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


def test_rungs_of_an_image_are_not_climbed_without_a_cluster() -> None:
    place = Place("", "/nowhere", small=True)
    found = list(climb.climb(place, [step.name for step in LADDER if step.on == "cluster"], lambda *_: None))
    assert [record.rung for record in found] == list(NAMES)
    assert {record.state for record in found} == {NOT_CLIMBED}
    assert {record.reason for record in found} == {climb.CLUSTER_NEEDED, "it was not selected"}


@pytest.mark.parametrize(
    ("accelerator", "gpus", "stops"),
    [("cuda", 0, True), ("rocm", 0, True), ("cuda", 8, False), ("cpu", 0, False)],
)
def test_an_image_for_gpus_climbs_nothing_without_one(accelerator: str, gpus: int, stops: bool) -> None:
    details = {"10.0.0.1": {"accelerator": accelerator, "gpus": gpus}}
    assert bool(climb.missing_gpus(Record("facts", PASSED, "", 1.0, [], details))) == stops


def test_the_record_of_several_gpus_has_the_worst_of_each() -> None:
    def record(rate: float, error: float) -> Record:
        measured = [Measurement("rate", rate, "GB/s"), Measurement("error", error)]
        return Record("attention", PASSED, "", 1.0, measured)

    records = {"GPU 0": record(3.0, 0.1), "GPU 1": record(2.0, 0.2)}
    combined = climb.combined("attention", records)
    assert (combined.state, [one.value for one in combined.measurements]) == (PASSED, [2.0, 0.2])
    failed = records | {"GPU 2": dataclasses.replace(record(1.0, 0.3), state=FAILED, reason="it differs")}
    assert climb.combined("attention", failed).reason == "GPU 2: it differs"
    assert worst([]) == []


def test_a_reason_that_several_gpus_have_appears_once() -> None:
    def reason(**reasons: str) -> str:
        records = {name: Record("streams", NOT_CLIMBED, text, 1.0) for name, text in reasons.items()}
        return climb.combined("streams", records).reason

    assert reason(a="no GPU", b="no GPU") == "no GPU"
    assert reason(a="no GPU", b="no NCCL", c="no GPU") == "a, c: no GPU; b: no NCCL"


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ({}, ""),
        ({"gpus": 8, "driver": "570.0"}, "nodes differ in driver"),
        ({"versions": {"torch": "2"}, "patches": ["a"]}, "nodes differ in versions and patches"),
    ],
    ids=["no GPU", "other driver", "other image"],
)
def test_only_nodes_with_gpus_need_the_same_driver(head: dict[str, Any], problem: str) -> None:
    same = {"address": "a", "versions": {}, "patches": [], "inputs": "aa"}
    of_head = same | {"gpus": 0, "driver": ""} | head
    node = same | {"gpus": 8, "driver": "580.0"}
    assert facts.differences([of_head, node, node]).partition(":")[0] == problem


def test_versions_in_another_order_are_the_same() -> None:
    """The order is that of a folder, which differs between file systems."""
    same = {"gpus": 8, "driver": "580.0", "patches": [], "inputs": "aa", "address": "a"}
    orders = ({"ray": "1", "torch": "2"}, {"torch": "2", "ray": "1"})
    assert facts.differences([same | {"versions": versions} for versions in orders]) == ""


@pytest.mark.parametrize(
    ("digests", "problem"),
    [
        (("aa", "aa", "aa"), ""),
        (("", "", ""), ""),
        (("aa", "bb", "aa"), "sha256:aa on 10.0.0.0, 10.0.0.2, sha256:bb on 10.0.0.1"),
        (("aa", "", "aa"), "sha256:aa on 10.0.0.0, 10.0.0.2, an unknown one on 10.0.0.1"),
    ],
)
def test_nodes_of_different_images_are_named_with_both_digests(
    digests: tuple[str, ...], problem: str
) -> None:
    same = {"gpus": 8, "driver": "580.0", "versions": {}, "patches": []}
    nodes = [same | {"address": f"10.0.0.{n}", "inputs": inputs} for n, inputs in enumerate(digests)]
    assert facts.differences(nodes).partition("inputs: ")[2] == problem


@pytest.mark.parametrize("problem", ["", "nodes differ in driver"])
def test_the_rung_of_facts_has_their_machines_and_fails_if_they_differ(
    monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    node = {
        **{"address": "a", "gpus": 2, "ray_gpus": 2.0, "driver": "580.0", "inputs": "aa"},
        **{"versions": {}, "patches": [], "rdma": {"adapters": []}, "gpu_models": ("NVIDIA H100",) * 2},
    }
    monkeypatch.setattr(on_cluster, "node_report", lambda *_: [node, node | {"address": "b"}])
    monkeypatch.setattr(facts, "differences", lambda _: problem)
    found = facts.climb(Place("", "/nowhere", small=False))
    assert found.problem == problem
    assert facts.machines(list(found.details.values())) == [Machine(2, "NVIDIA H100", "580.0")] * 2


def test_the_first_error_of_an_engine_is_the_reason() -> None:
    """What Ray and vLLM raise in the rung's process does not say why the engine's own process ended."""
    log = """(RolloutRayActor pid=7) (EngineCore pid=8) Traceback (most recent call last):
(RolloutRayActor pid=7) (EngineCore pid=8)   File "/opt/vllm/v1/engine/core.py", line 9, in run
(RolloutRayActor pid=7) (EngineCore pid=8) OSError: libcuda.so.1: cannot open shared object file
RuntimeError: Engine core initialization failed. See root cause above."""
    reason = "RuntimeError: Engine core initialization failed. See root cause above."
    found = climb.explained(Record("sleep", FAILED, reason, 1.0, log=log))
    assert found.reason == f"{reason}; first error: OSError: libcuda.so.1: cannot open shared object file"
    assert climb.explained(found) == found
    passed = Record("sleep", PASSED, "", 1.0, log=log)
    assert climb.explained(passed) == passed


def test_a_reason_has_no_colours() -> None:
    climbed = MagicMock(side_effect=RuntimeError("\x1b[36mray::Engine()\x1b[39m died"))
    assert climb.recorded(LADDER[0], climbed).reason == "RuntimeError: ray::Engine() died"


def test_a_rank_that_fails_without_a_message_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class RayError(Exception):
        cause = AssertionError()

    exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=TimeoutError)
    failing = SimpleNamespace(wait=MagicMock(), get=MagicMock(side_effect=RayError), exceptions=exceptions)
    monkeypatch.setattr(on_cluster, "ray", failing)
    with pytest.raises(RuntimeError, match="rank 1: AssertionError: no message"):
        on_cluster.answers([object()], ["rank 1"], 1.0)


def test_modules_of_all_rungs_have_their_functions() -> None:
    files = {file.stem: file.read_text() for file in Path(ladder.__file__).parent.glob("*.py")}
    for step in LADDER:
        module, _, name = step.module.removeprefix(ladder.HERE).partition(":")
        assert f"def {name or 'climb'}(place: Place) -> Found:" in files[module]
