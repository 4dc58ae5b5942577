"""Figures and names in README.md and docs/using.md that follow from the code or the matrix."""

import re
from collections import Counter

import pytest
from rlhf_stack.cli import commands, main
from rlhf_stack.cli.commands import submit
from rlhf_stack.cluster import ports
from rlhf_stack.config import env_vars
from rlhf_stack.diagnostics.network_check import model
from rlhf_stack.sync import encoding, probabilities

from scripts.locks import lockfile
from scripts.matrix.load import expand_all, find, load
from scripts.paths import ROOT

README, USING = (
    " ".join((ROOT / name).read_text(encoding="utf-8").split()) for name in ("README.md", "docs/using.md")
)
MATRIX = load()
CELLS = [cell for cell in expand_all(MATRIX) if not cell.id.endswith("-stand-in")]
DEFAULT = find(MATRIX, MATRIX.default)
PORTS = ports.RAY_DEFAULT_RANGE


def test_the_images_of_each_accelerator_are_counted() -> None:
    kinds = Counter(str(cell.accelerator.kind) for cell in CELLS)
    assert re.findall(r"- (\w+) images \((\d)\):", README) == [
        (name, str(kinds[name.lower()])) for name in ("CPU", "CUDA", "ROCm")
    ]


def test_the_headline_versions_are_those_of_the_matrix() -> None:
    found = re.findall(r"vLLM ([\d.]+) (?:is )?in (?:the images|those) with OpenRLHF ([\d.]+\d)", README)
    assert sorted(found) == sorted({(cell.versions["vllm"], cell.versions["openrlhf"]) for cell in CELLS})
    [torch] = re.findall(r"`(torch==[^`]+)`", README)
    assert f"\n{torch} " in lockfile.path(DEFAULT).read_text(encoding="utf-8")


def test_ci_runs_the_demo_of_each_other_cpu_image() -> None:
    others = [cell for cell in CELLS if cell.ci_suites]
    assert {cell.id for cell in others} == {
        cell.id for cell in CELLS if cell.accelerator.kind == "cpu" and cell.id != DEFAULT.id
    }
    assert {suite for cell in others for suite in cell.ci_suites} == {"demo"}


def test_the_readme_lists_every_command() -> None:
    assert sorted(re.findall(r"\| `rlhf-stack ([\w-]+)` \|", README)) == sorted(commands.NAMES)


def test_the_plan_that_is_shown_is_the_one_that_is_tested() -> None:
    """`tests/cluster/test_commands.py` runs it."""
    shown = (ROOT / "tests" / "cluster" / "plan.console").read_text(encoding="utf-8")
    assert f"```console\n{shown}```\n" in (ROOT / "docs" / "using.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (env_vars.SYNC_TIMEOUT, env_vars.sync_timeout),
        (env_vars.SYNC_BUCKET, lambda: env_vars.sync_bucket() / 1e6),
        (env_vars.SYNC_FULL_EVERY, env_vars.sync_full_every),
        (env_vars.ENGINE_TIMEOUT, env_vars.engine_timeout),
        (env_vars.ENGINE_RESTARTS, env_vars.engine_restarts),
        (env_vars.MIN_ENGINES, env_vars.min_engines),
        (env_vars.PLACEMENT_TIMEOUT, env_vars.placement_timeout),
    ],
)
def test_defaults_of_variables(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    assert callable(value)
    [text] = re.findall(rf"\| `{name}` \| ([^|]+) \|", USING)
    assert re.findall(r"\((\d+)[);:]", text)[-1] == f"{value():g}", text


@pytest.mark.parametrize(
    "text",
    [
        f"exit code {submit.REFUSED}, with the reason",
        f"{submit.REFUSED} to {submit.REFUSED + 2} are its own",
        f"a defect of `rlhf-stack` (exit code {main.DEFECT})",
        f"the log-probabilities of {probabilities.COUNT} fixed tokens",
        f"if their mean difference exceeds {probabilities.TOLERANCE:g} nats",
        f"more than {encoding.SLOW_SECONDS:g} s at less than {encoding.SLOW_RATE:g} GB/s",
        f"a random port between {PORTS[0]} and {PORTS[1] - ports.MIN_PORTS} at",
        {0.1: "If the speed of a link is known, the link must reach 10 % of it"}[model.SPEED_SHARE],
        {2: "each node of engines have twice as much left"}[encoding.ROOM],
    ],
)
def test_constants(text: str) -> None:
    assert text in USING
