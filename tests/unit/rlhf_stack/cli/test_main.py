"""rlhf_stack.cli.main: the commands, their help, exit codes and errors."""

import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from rlhf_stack.cli import commands, run_options
from rlhf_stack.cli.commands import patches, reap
from rlhf_stack.cli.json_output import print_json
from rlhf_stack.cli.main import main
from rlhf_stack.config import env_vars
from rlhf_stack.diagnostics import network_check
from rlhf_stack.diagnostics.installed_patches import PatchStatus
from rlhf_stack.diagnostics.monitor import state
from rlhf_stack.diagnostics.network_check import model
from rlhf_stack.errors import UserError
from rlhf_stack.known_bad.finding import Finding
from rlhf_stack.recovery.preemption import Answer

RUNTIME = Path(commands.__file__).parents[3]
RUN = ("python", "-m", "openrlhf.cli.train_ppo_ray")
HEAVY = ("torch", "ray", "vllm", "transformers", "rich")


def test_every_module_is_a_command_in_the_list() -> None:
    modules = {module.name.replace("_", "-") for module in pkgutil.iter_modules(commands.__path__)}
    assert sorted(commands.NAMES) == sorted(modules)


@pytest.mark.parametrize("name", commands.NAMES)
def test_the_help_of_every_command_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    expected = capsys.readouterr().out
    assert f"\n  rlhf-stack {name}" in expected
    assert "--json" in expected


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (
            "check-network",
            (model.NetworkReport, model.CheckedNode, model.Interface, model.Link, model.Attempt),
        ),
        ("top", (state.RunState, state.EngineState, state.GpuMemory, state.PendingGroup)),
        ("doctor", (Finding,)),
        ("reap", (reap.StaleResource,)),
        ("checkpoint", (Answer,)),
        ("patches", (PatchStatus,)),
    ],
)
def test_help_names_every_field_of_the_json(name: str, shown: tuple[type[Any], ...]) -> None:
    """The output of the other commands is checked by tests/cluster/test_commands.py."""
    expected = set(re.findall(r"\w+", (commands.load(name).__doc__ or "").partition("--json prints")[2]))
    assert {field.name for one in shown for field in fields(one)} - expected == set()


def test_help_lists_every_command_with_its_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    expected = " ".join(capsys.readouterr().out.split())
    for name in commands.NAMES:
        first = (commands.load(name).__doc__ or "").split("\n")[0]
        assert f"{name} {' '.join(first.split())}" in expected


@pytest.mark.parametrize(("old", "new"), commands.RENAMED.items())
def test_an_old_name_runs_the_command_with_a_warning(
    old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([old, "--help"])
    assert ended.value.code == 0
    output = capsys.readouterr()
    assert output.out.startswith(f"usage: rlhf-stack {new} ")
    assert output.err == (
        f"warning: `rlhf-stack {old}` is now `rlhf-stack {new}`; the old name will be removed in the next "
        "release\n"
    )


def test_the_warning_of_an_old_name_is_a_json_line_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(env_vars.LOG_FORMAT, "json")
    with pytest.raises(SystemExit):
        main(["profile", "--help"])
    line = json.loads(capsys.readouterr().err)
    assert line["level"] == "warning"
    assert line["message"].startswith("`rlhf-stack profile` is now `rlhf-stack tune`")


@pytest.mark.parametrize(("command", "code"), [("patches", 2), ("submit", 121)])
def test_a_file_that_cannot_be_read_is_wrong_usage(
    command: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`submit` reserves its codes: 2 is that of a job."""
    error = PermissionError(13, "Permission denied", "/models/config.json")
    monkeypatch.delenv(env_vars.TRACEBACK, raising=False)
    monkeypatch.setattr(commands.load(command), "run", MagicMock(side_effect=error))
    assert main([command]) == code
    assert capsys.readouterr().err == "error: /models/config.json: Permission denied\n"


@pytest.mark.usefixtures("json_lines")
def test_the_progress_of_the_network_check_is_json_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(*_: Any, progress: Callable[[str], None], **__: Any) -> model.NetworkReport:
        progress("the group of 2 ranks")
        return model.NetworkReport("gloo", 0.1, (), (), None)

    monkeypatch.setattr(network_check, "check_network", check)
    monkeypatch.setattr("rlhf_stack.cluster.connect.connected", nullcontext)
    main(["check-network", "--backend", "gloo"])
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "the group of 2 ranks"


@pytest.mark.parametrize(
    ("words", "of_run", "of_environment", "accelerator", "tested"),
    [
        (["--", "x"], "gloo", "nccl", "cuda", "gloo"),
        (["--", "x"], "nccl", "gloo", "cuda", "nccl"),
        (["--", "x"], "auto", "gloo", "cuda", "nccl"),
        (["--", "x"], "nccl", "", "cpu", "gloo"),
        (["--backend", "nccl", "--", "x"], "gloo", "", "cuda", "nccl"),
        ([], "gloo", "", "cuda", "nccl"),
        ([], "nccl", "gloo", "rocm", "gloo"),
        ([], "nccl", "auto", "cuda", "nccl"),
        ([], "nccl", "", "cpu", "gloo"),
    ],
)
def test_the_network_check_uses_the_sync_backend_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    of_run: str,
    of_environment: str,
    accelerator: str,
    tested: str,
) -> None:
    run = SimpleNamespace(request=None, sync_backend=of_run)
    used: list[Any] = []

    def check(backend: str, *_: Any, **__: Any) -> model.NetworkReport:
        used.append(backend)
        return model.NetworkReport(backend, 0.1, (), (), None)

    monkeypatch.setenv(env_vars.ACCELERATOR, accelerator)
    monkeypatch.setenv(env_vars.SYNC_BACKEND, of_environment)
    monkeypatch.setattr(run_options, "parse_run", lambda _: (run, ()))
    monkeypatch.setattr(network_check, "check_network", check)
    monkeypatch.setattr("rlhf_stack.cluster.connect.connected", nullcontext)
    main(["check-network", *words])
    assert used == [tested]


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ([], {}),
        (["--", "env", "NCCL_IB_HCA==mlx5_0", "CUDA_VISIBLE_DEVICES=1", *RUN], {"NCCL_IB_HCA": "=mlx5_0"}),
    ],
)
def test_the_network_check_gives_its_processes_the_variables_of_the_run(
    monkeypatch: pytest.MonkeyPatch, words: list[str], variables: dict[str, str]
) -> None:
    check = MagicMock(return_value=model.NetworkReport("gloo", 0.1, (), (), None))
    run = SimpleNamespace(request=None, sync_backend="nccl")
    monkeypatch.setenv(env_vars.ACCELERATOR, "cuda")
    monkeypatch.setattr(run_options, "parse_run", lambda _: (run, ()))
    monkeypatch.setattr(network_check, "check_network", check)
    monkeypatch.setattr("rlhf_stack.cluster.connect.connected", nullcontext)
    main(["check-network", *words])
    assert check.call_args.kwargs["variables"] == variables


def test_help_lists_no_old_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert not set(commands.RENAMED) & set(re.findall(r"[\w-]+", capsys.readouterr().out))


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, contextlib\nfrom rlhf_stack.cli.main import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(RUNTIME)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ModuleNotFoundError("No module named 'ray'", name="ray")
    monkeypatch.setattr(patches, "run", MagicMock(side_effect=error))
    assert main(["patches"]) == 2
    assert capsys.readouterr().err.startswith("error: ray is not installed:")


@pytest.mark.parametrize(
    "error",
    [ModuleNotFoundError("No module named 'rlhf_stack.x'", name="rlhf_stack.x"), ZeroDivisionError("x")],
)
def test_a_defect_is_one_line_with_a_code_of_its_own(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patches, "run", MagicMock(side_effect=error))
    assert main(["patches"]) == 70
    expected = capsys.readouterr().err
    assert expected.startswith(f"error: a defect of rlhf-stack: {type(error).__name__}: ")
    assert expected.count("\n") == 1
    monkeypatch.setenv("RLHF_STACK_TRACEBACK", "1")
    with pytest.raises(type(error)):
        main(["patches"])


@pytest.mark.parametrize(
    ("word", "near"), [("doctr", "; did you mean 'doctor'?"), ("frobnicate", "'frobnicate';")]
)
def test_an_unknown_command_is_reported_with_the_known_ones(
    word: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    expected = capsys.readouterr().err
    assert near in expected
    assert all(name in expected for name in commands.NAMES)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("no such file: x"), 2, "error: no such file: x\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_an_error_and_an_interrupt_are_one_line(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(patches, "run", MagicMock(side_effect=error))
    assert main(["patches"]) == code
    assert capsys.readouterr() == ("", line)
    assert main(["patches", "--json"]) == code
    output, errors = capsys.readouterr()
    assert errors == line
    expected = line.removeprefix("error: ").removesuffix("\n")
    assert json.loads(output) == {"schema": "rlhf-stack/error/1", "error": expected, "code": code}


def test_a_closed_pipe_causes_no_traceback() -> None:
    environment = os.environ | {"PYTHONPATH": str(RUNTIME)}
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_stack", "patches"],
        env=environment,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 141
    assert done.stderr == ""


def test_json_names_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    print_json("doctor", 1, findings=[])
    assert json.loads(capsys.readouterr().out) == {"schema": "rlhf-stack/doctor/1", "findings": []}


def test_a_folder_that_exists_is_refused_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, "cpu")
    assert main(["certify", "--out", str(tmp_path)]) == 2
    assert "it exists already" in capsys.readouterr().err
    assert tmp_path.is_dir()


def test_a_dry_run_with_an_address_does_not_need_the_heads_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["start", "--auth", "none", "--join", "no-such-host.invalid", "--dry-run"]
    assert main([*words, "--node-ip-address", "10.0.0.1"]) == 0
    assert "--node-ip-address 10.0.0.1" in capsys.readouterr().out
