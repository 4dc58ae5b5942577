"""Parsing by upstream's main block, which is executed up to ``train``; a mistake is a one-line error."""

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from rlhf_stack.errors import UserError
from rlhf_stack.openrlhf import command_line
from rlhf_stack.openrlhf.command_line import ArgumentsError, extract_arguments, parse

# As upstream writes it: heavy imports at the top, the parser below the name check, checks in between.
SOURCE = """
import argparse
import a_heavy_package_that_is_not_here
from datetime import datetime


def _validate_args(args):
    assert args.nodes < 5, f"nodes must be below 5, got {args.nodes}"


def train(args):
    a_heavy_package_that_is_not_here.begin(args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--critic", default=None)
    parser.add_argument("--name", default=f"{datetime.now():%Y}")
    args = parser.parse_args()
    if args.critic == "None":
        args.critic = None
        print("[Warning] no critic")
    if args.critic == "broken":
        args.critic.split_up()
    train(args)
"""


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install an OpenRLHF whose parser is in this file."""
    file = tmp_path / "train_ppo_ray.py"
    file.write_text(SOURCE)
    monkeypatch.setattr(command_line, "_installed", lambda _: ("0.11.2", file))
    return file


@pytest.mark.usefixtures("upstream")
def test_main_block_yields_the_arguments_of_train() -> None:
    before = list(sys.argv)
    parsed = parse(["--nodes", "3", "--critic", "None"])
    assert (parsed.values.nodes, parsed.values.critic) == (3, None)
    assert parsed.release == "0.11.2"
    assert parsed.notes == ("[Warning] no critic",)
    assert sys.argv == before


@pytest.mark.usefixtures("upstream")
@pytest.mark.parametrize("name", [["--name", "20261127_1030"], ["--name=20261127_1030"]])
def test_a_name_of_digits_and_underscores_is_no_number(name: list[str]) -> None:
    assert parse(name).values.name == "20261127_1030"
    with pytest.raises(UserError, match=r"'0_3': expected a number in the digits 0 to 9"):
        parse([*name, "--nodes", "0_3"])


@pytest.mark.usefixtures("upstream")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "many"], "OpenRLHF 0.11.2: argument --nodes: invalid int value: 'many'"),
        (["--nod", "1", "--bogus", "2"], "OpenRLHF 0.11.2: unrecognized arguments: --bogus 2"),
        (["--nodes", "8"], "OpenRLHF 0.11.2 rejects these arguments: nodes must be below 5, got 8"),
        (
            ["--critic", "broken"],
            "AttributeError: 'str' object has no attribute 'split_up', in `args.critic.split_up()`",
        ),
    ],
)
def test_mistake_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ArgumentsError) as raised:
        parse(arguments)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("program", ["train_ppo_ray", "train_sft"])
@pytest.mark.parametrize(
    ("release", "flag", "value"),
    [
        ("0.11.2", "ds.ring_attn_size", "0"),
        ("0.11.2", "ds.tensor_parallel_size", "0"),
        ("0.11.2", "rollout.micro_batch_size", "0"),
        ("0.11.2", "actor.num_nodes", "100001"),
        ("0.5.1", "critic_num_gpus_per_node", "0"),
    ],
)
def test_limits_apply_before_the_checks_of_upstream(
    upstream: Path, monkeypatch: pytest.MonkeyPatch, release: str, flag: str, value: str, program: str
) -> None:
    """Which divide by these numbers, and name another one."""
    upstream.write_text(
        "import argparse\n"
        "def _validate_args(args):\n"
        f"    assert 8 // getattr(args, {flag!r}), 'the number of sample batches'\n"
        'if __name__ == "__main__":\n'
        "    parser = argparse.ArgumentParser()\n"
        f"    parser.add_argument('--{flag}', type=int)\n"
        "    args = parser.parse_args()\n"
        "    train(args)\n"
    )
    monkeypatch.setattr(command_line, "_installed", lambda _: (release, upstream))
    with pytest.raises(UserError, match=rf"^--{flag} {value}: expected a number from 1 to"):
        parse([f"--{flag}", value], program)


def test_a_package_that_openrlhf_lacks_is_named(upstream: Path) -> None:
    """It was "OpenRLHF rejects these arguments", which are right."""
    upstream.write_text('import missing_package\nif __name__ == "__main__":\n    train(missing_package)\n')
    with pytest.raises(ArgumentsError, match=r"^OpenRLHF 0.11.2 needs missing_package, which is not"):
        parse([])


@pytest.mark.usefixtures("upstream")
def test_every_flag_of_an_older_release_gets_its_hint() -> None:
    """Only four were shown, and a published script has 40."""
    old = [
        *("--perf", "--ptx_coef", "--pretrain_data", "--actor_init_on_gpu", "--disable_trace_cache"),
        "--noded",
    ]
    with pytest.raises(ArgumentsError) as raised:
        parse(old)
    assert all(f"leave {flag} out" in str(raised.value) for flag in old[:-1])
    assert "did you mean '--nodes'?" in str(raised.value)


def test_module_without_a_main_block_is_named(upstream: Path) -> None:
    upstream.write_text("import argparse\n")
    with pytest.raises(ArgumentsError, match="no main block"):
        parse([])


def test_missing_openrlhf_is_an_error_with_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "version", MagicMock(side_effect=PackageNotFoundError))
    with pytest.raises(ArgumentsError, match="OpenRLHF is not installed, and"):
        parse([])


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-m", "openrlhf.cli.train_ppo_ray"],
        ["python3", "-u", "-m", "openrlhf.cli.train_ppo_ray"],
        ["python", "/some/where/openrlhf/cli/train_ppo_ray.py"],
        ["ray", "job", "submit", "--", "python", "-m", "openrlhf.cli.train_ppo_ray"],
        ["python", "-mopenrlhf.cli.train_ppo_ray"],
        ["/venv/bin/python3.12", "-Bum", "openrlhf.cli.train_ppo_ray"],
        ["env", "CFG=/a/b.py", "python", "-m", "openrlhf.cli.train_ppo_ray"],
        ["numactl", "-m", "0", "python", "-m", "openrlhf.cli.train_ppo_ray"],
        ["env", "PYTHONPATH=/opt/deepspeed", "python", "-m", "openrlhf.cli.train_ppo_ray"],
        ["uv", "run", "-m", "openrlhf.cli.train_ppo_ray"],
        [],
    ],
    ids=" ".join,
)
def test_arguments_are_extracted_from_a_command(command: list[str]) -> None:
    assert extract_arguments([*command, "--nodes", "2"]) == ["--nodes", "2"]


def test_a_file_of_python_among_arguments_alone_is_no_program() -> None:
    words = ["--reward.remote_url", "/judges/reward.py"]
    assert extract_arguments(words) == words


@pytest.mark.parametrize("launcher", ["torch.distributed.run -m", "torch.distributed.launch --module"])
def test_a_launcher_that_is_a_module_is_refused_as_one(launcher: str) -> None:
    with pytest.raises(UserError, match="starts train_ppo_ray once for each GPU"):
        extract_arguments(["python", "-m", *launcher.split(), "openrlhf.cli.train_ppo_ray"])


def test_other_command_is_an_error() -> None:
    with pytest.raises(ArgumentsError, match="'ls' does not start a run"):
        extract_arguments(["ls", "-l"])


@pytest.mark.parametrize(
    "words",
    [
        ["--ckpt.path", "/ckpt/train_ppo_ray", "--nodes", "2"],
        ["--nodes", "2", "--ckpt.path", "runs/train_ppo_ray.py"],
        ["--path", "-m", "train_ppo_ray"],
    ],
    ids=" ".join,
)
def test_a_value_that_ends_as_the_program_does_hides_nothing(words: list[str]) -> None:
    """All that stands before it was lost, so that another run was planned and submitted."""
    assert extract_arguments(["python", "-m", "openrlhf.cli.train_ppo_ray", *words]) == words


@pytest.mark.parametrize(
    "words",
    [
        "python -m openrlhf.cli.train_ppo_ray.py",
        "python -mopenrlhf.cli.train_ppo_ray.py",
        "deepspeed --module openrlhf.cli.train_sft.py",
    ],
)
def test_a_module_with_the_name_of_its_file_is_refused(words: str) -> None:
    """It was planned, and Python has no such module."""
    with pytest.raises(UserError, match=r"_\w+\.py' is a file's name, not a module's: leave \.py out"):
        extract_arguments(words.split())


def test_a_value_of_a_flag_is_not_the_program() -> None:
    with pytest.raises(ArgumentsError, match="'bash' does not start a run"):
        extract_arguments(["bash", "run.sh", "--x", "1", "--reward.remote_url", "r.py"])
    planned = ("./train_ppo_ray.py --x 1", "python -u train_ppo_ray.py --x 1")
    for words in (*planned, "nohup --verbose openrlhf/cli/train_ppo_ray.py --x 1"):
        assert extract_arguments(words.split()) == ["--x", "1"]


def test_an_error_names_all_programs_that_are_planned() -> None:
    with pytest.raises(ArgumentsError, match=r"of train_ppo_ray, train_sft, train_dpo or train_rm, such as"):
        extract_arguments(["deepspeed", "--module", "openrlhf.cli.train_kto"])


def test_another_module_is_an_error_even_if_a_value_names_the_program() -> None:
    with pytest.raises(ArgumentsError, match=r"'my\.module' does not start a run"):
        extract_arguments(["python", "-m", "my.module", "--path", "/ckpt/train_ppo_ray"])
