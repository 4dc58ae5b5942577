"""docs/stability.md names what the code has: a name that appears or is lost has to be decided on."""

import ast
import re
from collections.abc import Iterator

from rlhf_stack.cli import commands
from rlhf_stack.cluster.run_metrics import METRICS
from rlhf_stack.config import env_vars
from rlhf_stack.diagnostics import host_check
from rlhf_stack.telemetry import step_metrics

from scripts.paths import ROOT

RUNTIME = ROOT / "images" / "runtime" / "rlhf_stack"
TEXT = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| ([a-zA-Z ]+) \| (.+) \|$", TEXT, re.MULTILINE))


def listed(row: str, pattern: str = ".*") -> set[str]:
    """The names in a row of the table that match the pattern."""
    return {name for name in re.findall(r"`([^`]+)`", ROWS[row]) if re.fullmatch(pattern, name)}


def calls(*functions: str) -> Iterator[list[object]]:
    """The constant arguments of each call of these functions in the runtime."""
    for path in RUNTIME.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                if name in functions:
                    yield [one.value for one in node.args if isinstance(one, ast.Constant)]


def test_commands() -> None:
    assert listed("commands", "[a-z-]+") - {"--help"} == set(commands.NAMES)


def test_json_schemas() -> None:
    found = {f"rlhf-stack/{arguments[0]}/{arguments[1]}" for arguments in calls("print_json")}
    assert listed("JSON output", "rlhf-stack/.*") == found | {host_check.SCHEMA}


def test_events() -> None:
    found = {arguments[0] for arguments in calls("emit") if arguments}
    assert listed("events") - {"event", "time", "host", "pid"} == found


def test_metrics() -> None:
    assert listed("metrics") == {f"ray_{name}" for name in (*METRICS, step_metrics.NAME)}


def test_variables() -> None:
    found = {value for value in vars(env_vars).values() if str(value).startswith("RLHF_STACK_")}
    assert listed("variables") == found


def test_the_users_guide_explains_every_variable() -> None:
    guide = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    table = guide.partition("## Variables")[2].partition("##")[0]
    explained = set(re.findall(r"^\| `(RLHF_STACK_[A-Z_]+)", table, re.MULTILINE))
    assert explained == listed("variables") - {env_vars.ACCELERATOR, env_vars.INPUTS}
