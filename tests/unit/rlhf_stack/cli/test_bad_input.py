"""Bad input to every command: one line and an exit code that is not 0; no traceback, nothing is ignored."""

import argparse
import contextlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rlhf_stack.cli import commands, run_options
from rlhf_stack.cli.commands import start, top
from rlhf_stack.cli.main import main
from rlhf_stack.cluster import auth_token
from rlhf_stack.compat import ray_private
from rlhf_stack.config import env_vars
from rlhf_stack.diagnostics.monitor.state import run_state
from rlhf_stack.inputs import files
from rlhf_stack.openrlhf import command_line, requirements
from rlhf_stack.telemetry import events

RUNTIME = Path(commands.__file__).parents[3]
EXAMPLES = int(os.environ.get("RLHF_STACK_FUZZ", "1000"))
SIZES = "layers:2,hidden:64,intermediate:128,heads:4,vocabulary:1000"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}
CLUSTER = ["--nodes", "2", "--gpu-memory", "80"]
MODEL = ["--model", f"m={SIZES}"]
# Flags of OpenRLHF 0.11, with their defaults; the parser turns their sections into attributes.
FLAGS = {
    **{f"{role}.num_nodes": 1 for role in ("actor", "ref", "critic", "reward")},
    **{f"{role}.num_gpus_per_node": 4 for role in ("actor", "ref", "critic", "reward")},
    **{f"{role}.model_name_or_path": "" for role in ("critic", "reward")},
    "actor.model_name_or_path": "m",
    "actor.adam.lr": 1e-6,
    "actor.adam.weight_decay": 0.0,
    "critic.adam.weight_decay": 0.0,
    "algo.kl.init_coef": 0.01,
    "data.max_len": 2048,
    "ds.attn_implementation": "sdpa",
    "ds.grad_accum_dtype": "bf16",
    "ds.lora.rank": 0,
    "ds.ring_attn_size": 1,
    "ds.tensor_parallel_size": 1,
    "ds.zero_stage": 2,
    "ds.zpg": 1,
    "reward.remote_url": "http://judge",
    "rollout.max_tokens_per_gpu": 16384,
    "rollout.micro_batch_size": 1,
    "rollout.temperature": 1.0,
    "train.batch_size": 128,
    "train.max_epochs": 1,
    "train.max_tokens_per_gpu": 16384,
    "train.micro_batch_size": 1,
    "vllm.gpu_memory_utilization": 0.8,
    "vllm.num_engines": 2,
    "vllm.sync_backend": "nccl",
    "vllm.tensor_parallel_size": 2,
    "actor.gradient_checkpointing_enable": True,
    **{
        f"{name}": False
        for name in (
            *("critic.offload", "ds.adam_offload", "ds.enable_sleep", "ds.load_in_4bit", "ds.overlap_comm"),
            *("ref.offload", "reward.offload", "train.async_enable", "train.colocate_actor_ref"),
            *("train.colocate_all", "train.colocate_critic_reward", "train.dynamic_batch_enable"),
            *("train.enable_ema", "vllm.enable_sleep"),
        )
    },
}
PARSER = f"""
import argparse
from types import SimpleNamespace

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in {FLAGS!r}.items():
        if isinstance(default, bool):
            parser.add_argument("--" + name, action="store_true", default=default)
        else:
            parser.add_argument("--" + name, type=type(default), default=default)
    args = SimpleNamespace()
    for name, value in vars(parser.parse_args()).items():
        *sections, last = name.split(".")
        place = args
        for section in sections:
            if not hasattr(place, section):
                setattr(place, section, SimpleNamespace())
            place = getattr(place, section)
        setattr(place, last, value)
    train(args)
"""


@pytest.fixture(autouse=True)
def _upstream(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """An OpenRLHF with these flags, pipes that are given up soon, and no cluster on this machine."""
    file = tmp_path_factory.mktemp("openrlhf") / "train_ppo_ray.py"
    file.write_text(PARSER)
    monkeypatch.setattr(command_line, "_installed", lambda _: ("0.11.2", file))
    monkeypatch.setattr(files, "IDLE_SECONDS", 0.05)


MODULE = "openrlhf.cli.train_ppo_ray"
STARTS = (  # of a run that is planned
    f"python -m {MODULE}",
    f"python -m{MODULE}",
    f"/venv/bin/python3.11 -u -m {MODULE}",
    f"python -um {MODULE}",
    "python /src/openrlhf/cli/train_ppo_ray.py",
    f"env CFG=/a/b.py python -m {MODULE}",
    f"numactl -m 0 python -m {MODULE}",
    f"ray job submit -- python -m {MODULE}",
)
NO_STARTS = (
    *(f"{launcher} {MODULE}" for launcher in ("torchrun -m", "deepspeed --module", "accelerate launch -m")),
    *(
        f"python -m {launcher} -m {MODULE}"
        for launcher in ("torch.distributed.run", "deepspeed.launcher.runner")
    ),
    *(f"mpirun -n 2 python -m {MODULE}", f"numactl -m {MODULE}", f"env A=1 {MODULE}", "python -m", "python"),
    *(
        "python -m my.module",
        "ls",
        f"ls {MODULE}",
        "train_ppo_ray",
        "numactl -m 0 ls",
        f"python -c -m{MODULE}x",
    ),
)


def run_of(*words: str, start: str = STARTS[0]) -> list[str]:
    return ["--", *start.split(), *words]


def call(words: list[str], standard_input: bytes | None = b"") -> tuple[int, str, str]:
    """The exit code and the output of a command in this process; without ``standard_input`` it is closed."""
    output, errors = io.StringIO(), io.StringIO()
    given_input = None if standard_input is None else io.TextIOWrapper(io.BytesIO(standard_input))
    before, sys.stdin = sys.stdin, given_input
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                code = main(words)
            except SystemExit as ended:
                code = int(ended.code or 0)
    finally:
        sys.stdin = before
    return code, output.getvalue(), errors.getvalue()


def require_refusal(words: list[str], standard_input: bytes | None = b"", code: int = 0) -> str:
    """The error of a command, which must be one line, also as JSON if that was requested."""
    ended, output, errors = call(words, standard_input)
    shown = f"{words} ended with {ended}, {output[:500]!r} and {errors[:500]!r}"
    assert ended == code if code else ended not in (0, 1, 70), shown
    assert errors.startswith("error: "), shown
    assert errors.count("\n") == 1, shown
    assert len(errors) < 6500, shown
    assert errors.isprintable() or errors[:-1].isprintable(), shown
    own = words[: words.index("--")] if "--" in words else words
    if "--json" in own:
        assert json.loads(output)["schema"] == "rlhf-stack/error/1", shown
        assert json.loads(output)["code"] == ended, shown
    else:
        assert output == "", shown
    return errors


@pytest.mark.parametrize("start", STARTS)
def test_the_run_of_these_tests_is_planned(start: str) -> None:
    """Otherwise every refusal below could be for another reason."""
    code, output, errors = call(["plan", *CLUSTER, *MODEL, *run_of(start=start)])
    assert (code, errors) == (0, ""), output
    assert "this run fits" in output


DEEP = "[" * 200_000
CONFIGS = {
    "list": b"[]",
    "number": b"3",
    "null": b"null",
    "empty": b"",
    "nan": json.dumps(CONFIG | {"x": float("nan")}).encode(),
    "infinity": b'{"vocab_size": 1e999}',
    "deep": DEEP.encode(),
    "binary": b"\x00\xff\xfe\x01" * 100,
    "utf-16": json.dumps(CONFIG).encode("utf-16"),
    "text for a number": json.dumps(CONFIG | {"hidden_size": "64"}).encode(),
    "float": json.dumps(CONFIG | {"hidden_size": 64.5}).encode(),
    "bool": json.dumps(CONFIG | {"hidden_size": True}).encode(),
    "negative": json.dumps(CONFIG | {"num_key_value_heads": -1}).encode(),
    "huge": json.dumps(CONFIG | {"vocab_size": 10**30}).encode(),
    "a long number": b'{"vocab_size": ' + b"9" * 6000 + b"}",
    "text_config is a list": b'{"text_config": [1]}',
    "experts are a list": json.dumps(CONFIG | {"num_experts": [1]}).encode(),
    "a key twice": json.dumps(CONFIG)[:-1].encode() + b', "hidden_size": 64}',
    "a key twice below": json.dumps(CONFIG)[:-1].encode() + b', "text_config": {"a": 1, "a": 2}}',
    "too large": b'{"a": "' + b"x" * (5 << 20) + b'"}',
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_bad_config_of_a_model_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(CONFIGS[name])
    line = require_refusal(["plan", *CLUSTER, "--model", f"m={file}", *run_of()])
    assert str(file) in line


HEADERS = {
    "list": b"[]",
    "number": b"1",
    "deep": DEEP.encode(),
    "no tensor": b'{"a": 1}',
    "no shape": b'{"a": {}}',
    "text": b'{"a": {"shape": "x"}}',
    "negative": b'{"a": {"shape": [-1]}}',
    "float": b'{"a": {"shape": [1.5]}}',
    "bool": b'{"a": {"shape": [true]}}',
    "huge": b'{"a": {"shape": [1000000000, 1000000000, 1000000000]}}',
    "binary": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_bad_header_of_safetensors_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    header = HEADERS[name]
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    line = require_refusal(["plan", *CLUSTER, "--model", f"m={tmp_path}/config.json", *run_of()])
    assert "model.safetensors" in line


CLUSTERS = {
    "empty": "",
    "scalar": "3",
    "deep": DEEP,
    "underscores": "nodes: [{count: 1_0}]",
    "hexadecimal": "nodes: [{count: 0x10}]",
    "octal": "nodes: [{gpus: 010}]",
    "octal CPUs": "nodes: [{cpus: 010}]",
    "sexagesimal": "nodes: [{count: 12:30}]",
    "sexagesimal fraction": "nodes: [{cpus: 1:30.5}]",
    "a key twice": "nodes: [{gpus: 4, gpus: 8}]",
    "a key twice at the top": "nodes: [{gpus: 4}]\nnodes: [{gpus: 8}]",
    "a tagged map that is none": "nodes: !!map [1]",
    "a tagged number that is none": "nodes: [{gpus: !!int [1]}]",
    "megabytes as gigabytes": "nodes: [{gpu_memory: 81920}]",
    "no GPU memory": "nodes: [{gpu_memory: 0}]",
    "a GPU memory of a byte": "nodes: [{gpu_memory: 1B}]",
    "memory of 2 PiB": "nodes: [{memory: 2PiB}]",
    "infinite": "nodes: [{gpus: .inf}]",
    "nan": "nodes: [{gpu_memory: .nan}]",
    "a fraction of a node": "nodes: [{count: 1.5}]",
    "no node": "nodes: [{count: 0}]",
    "too many nodes": "nodes: [{count: 1000000000}]",
    "too many nodes together": "nodes: [{count: 60000}, {count: 60000}]",
    "too many GPUs": "nodes: [{count: 100000, gpus: 1024}]",
    "bool": "nodes: [{gpus: true}]",
    "date": "nodes: [{gpus: 2026-99-99}]",
    "null": "nodes: [{gpus: null}]",
    "Unicode digits": "nodes: [{gpus: '\u0663'}]",
    "unknown unit": "nodes: [{gpu_memory: 80 bananas}]",
    "ambiguous unit": "nodes: [{gpu_memory: 80G}]",
    "unknown key": "nodes: [{gpu: 8}]",
    "unknown key at the top": "nodes: [{gpus: 8}]\nmode: x",
    "key that is no text": "nodes: [{8: 8}]",
    "markup": "nodes: [{address: '[/red]'}]",
    "escapes": 'nodes: [{address: "a\\e[31mb"}]',
    "address of two": "nodes: [{count: 2, address: a}]",
    "address twice": "nodes: [{address: a}, {address: a}]",
    "number as address": "nodes: [{address: 7}]",
    "many aliases": "a: &a [x,x,x,x,x,x,x,x]\n"
    + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12))
    + "nodes: [{gpus: *m}]",
    "a cycle": "nodes: [{gpus: &a [*a]}]",
    "tag": "nodes: !!python/object/apply:os.system [true]",
    "tab": "nodes:\n\t- gpus: 8",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", CLUSTERS)
def test_a_bad_cluster_file_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text(CLUSTERS[name])
    require_refusal(["plan", "--cluster", str(file), *MODEL, *run_of()])


def test_sizes_have_the_same_units_everywhere(tmp_path: Path) -> None:
    """In options and in files; 80GB are 80e9 bytes."""
    file = tmp_path / "nodes.yaml"
    file.write_text("nodes: [{count: 2, gpu_memory: 80GB, memory: 1TiB}]")
    options = ["--nodes", "2", "--gpu-memory", "80GB", "--memory", "1TiB"]
    found = [
        json.loads(call(["plan", *words, "--json", *MODEL, *run_of()])[1])["nodes"][0]
        for words in (["--cluster", str(file)], options)
    ]
    assert found[0] == found[1]
    assert found[0]["gpu_memory"] == 80 * 10**9
    assert found[0]["memory"] == 1 << 40


def test_numbers_of_a_cluster_file_may_be_text_or_fractions(tmp_path: Path) -> None:
    file = tmp_path / "nodes.yaml"
    file.write_text("nodes: [{count: '2', gpus: 8, cpus: 12.5, gpu_memory: 4TiB, memory: 1PiB}]")
    code, output, _ = call(["plan", "--cluster", str(file), "--json", *MODEL, *run_of()])
    assert code == 0
    assert [node["cpus"] for node in json.loads(output)["nodes"]] == [12.5, 12.5]


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "long name", "null character", "empty"])
@pytest.mark.parametrize("where", ["--cluster", "--model", "--log", "--freeze"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str, where: str) -> None:
    names = {"long name": "x/" + "y" * 5000, "null character": "a/\0b", "empty": ""}
    name = names.get(kind, str(tmp_path / "it"))
    if kind == "folder":
        Path(name).mkdir()
    elif kind == "fifo":
        os.mkfifo(name)
    words = {
        "--cluster": ["plan", "--cluster", name, *MODEL, *run_of()],
        "--model": ["plan", *CLUSTER, "--model", f"m={name}", *run_of()],
        "--log": ["doctor", "--log", name],
        "--freeze": ["doctor", "--freeze", name],
    }
    require_refusal(words[where])


def test_a_pipe_with_a_writer_is_read() -> None:
    """As `<(pip freeze)` is."""
    reading, writing = os.pipe()
    os.write(writing, b"torch==2.9.0\n")
    os.close(writing)
    try:
        assert call(["doctor", "--freeze", f"/dev/fd/{reading}"])[0] in (0, 1, 3)
    finally:
        os.close(reading)


def test_a_binary_log_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.log"
    file.write_bytes(b"\0\1\2\0" * 1000)
    assert "not a text file" in require_refusal(["doctor", "--log", str(file)])


@pytest.mark.timeout(20)
def test_a_line_of_20_megabytes_takes_seconds(tmp_path: Path) -> None:
    """Patterns of the known-bad database ran over it for 80 s."""
    file = tmp_path / "job.log"
    file.write_text("x" * 20_000_000 + "\nRuntimeError: end\n")
    assert call(["doctor", "--log", str(file)])[0] == 4


def test_an_image_that_cannot_be_written_is_refused_before_the_plan(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing" / "plan.svg", tmp_path, tmp_path / "pipe", Path("/dev/full")):
        require_refusal(["plan", *CLUSTER, *MODEL, "--svg", str(path), *run_of()])


@pytest.mark.parametrize(
    "words",
    [
        ["--cluster", "x.yaml", "--gpus", "4"],
        ["--ray", "auto", "--memory", "4"],
        ["--nodes", "2", "--ray", ""],
        ["--nodes", "2", "--gpus", "5000"],
        ["--nodes", "2", "--gpus", "08"],
        ["--nodes", "2", "--gpu-memory", "81920"],
        ["--nodes", "2", "--gpu-memory", "80TB"],
        ["--nodes", "2", "--gpu-memory", "0"],
        ["--nodes", "2", "--gpu-memory", "1e-30"],
        ["--nodes", "2", "--memory", "0"],
        ["--nodes", "2", "--memory", "2PiB"],
        ["--nodes", "100001"],
        ["--nodes", "2", "--gpu-mem", "80"],
        ["--nodes", "2", "--model", "m=layers:2,layers:3"],
        ["--nodes", "2", *MODEL, *MODEL],
        ["--nodes", "2", "--model", "m="],
        ["--nodes", "2", "--model", "m= "],
        ["--nodes", "2", "--model", "other=" + SIZES],
        ["--nodes", "2", "--model", "m=layers:1e300"],
        ["--nodes", "2", "--model", "m=" + SIZES + ",experts:1.5"],
    ],
    ids=" ".join,
)
def test_what_would_be_ignored_is_refused(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))  # which nobody named
    monkeypatch.chdir(tmp_path)
    require_refusal(["plan", *words, *([] if "--model" in words else MODEL), *run_of()])


@pytest.mark.parametrize(
    "words",
    [
        *("doctor --host --log -", "doctor --host --local", "doctor --host --all", "doctor --log - --local"),
        *("doctor --log - --all", "doctor --freeze - --local", "doctor --host --timeout 5"),
        *("doctor --log - --timeout 5", "doctor --freeze - --timeout 5", "doctor --local --timeout 5"),
        *("start --join 10.0.0.1 --port 7777", "start --join 10.0.0.1 --dashboard-host 127.0.0.1"),
        *("start --head --expect-gpus 8", "submit --min-nodes 2 -- true", "submit --node-wait 2 -- true"),
    ],
)
def test_an_option_that_another_one_makes_useless_is_refused(words: str) -> None:
    assert "has no effect with" in require_refusal(words.split())


PLAN = ["plan", *CLUSTER, *MODEL]
START = ["start", "--head", "--dry-run", "--auth", "none"]


WRONG_USAGE = [
    ("plan", "--nodes two", "'two': expected a whole number of at least 1"),
    ("plan", "--nodes 2 --gpu-memory -1", "'-1': expected a size from 1GiB to 4TiB, such as 80"),
    ("plan", "--nodes 2 --gpus nan", "'nan': expected a whole number of at least 0 and at most 1,024"),
    ("plan", "--nodes 2 --gpus 1025", "'1025': expected a whole number of at least 0 and at most 1,024"),
    ("plan", "--nodes 2 --cpus inf", "'inf': expected a number of at least 0 and at most 100,000"),
    ("plan", "--nodes 2 --cpus 100001", "'100001': expected a number of at least 0 and at most 100,000"),
    ("plan", "", "no command line of a run"),
    ("plan", "--nodes 2 -- ls", "'ls' does not start a run"),
    ("start", "", "one of the arguments --head --join is required"),
    ("start", "--head --port 99999", "expected a port"),
    ("start", "--join a:b:c --dry-run", "expected the head's HOST or HOST:PORT"),
    ("start", "--join no-such-host.invalid:6379 --dry-run", "'no-such-host.invalid' has no address"),
    ("start", "--head --num-gpus -1", "'-1': expected a whole number of at least 0"),
    ("check-network", "--size nan", "'nan': expected a number greater than 0"),
    ("check-network", "--backend mpi", "invalid choice: 'mpi'"),
    ("certify", "--fake-gpus 2,x", "'x': expected a whole number of at least 1"),
    ("certify", "--rung attentoin", "no rung 'attentoin'"),
    ("submit", "", "no command line of a run"),
    ("submit", "--env NOT_SET -- ls", "NOT_SET is not set in this shell"),
    ("submit", "--grace 5 -- ls", "5: expected 10 seconds or more"),
    ("checkpoint", "--within 0", "'0': expected a number greater than 0"),
    ("checkpoint", "now", "unrecognized arguments: now"),
    ("tune", "--nodes 0", "'0': expected a whole number"),
    ("tune", "--nodes 2 -- ls", "'ls' does not start a run"),
    ("top", "--events /nowhere", "/nowhere: no such directory"),
    ("top", "--every 2", "unrecognized arguments: --every"),
    ("doctor", "--log /nowhere", "/nowhere: No such file or directory"),
    ("doctor", "--freeze /dev/null", "/dev/null is empty"),
    ("doctor", "--timeout 0", "'0': expected a number greater than 0"),
    ("reap", "--older-than soon", "'soon': expected a number of at least 0"),
    ("reap", "engines", "unrecognized arguments: engines"),
    ("patches", "--all", "unrecognized arguments: --all"),
    ("patches", "vllm", "unrecognized arguments: vllm"),
]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        *(([name, *words.split()], expected) for name, words, expected in WRONG_USAGE),
        ([*PLAN, "--", "python -m openrlhf.cli.train_ppo_ray"], "is one word: leave out its quotes"),
        (["submit", "--", "python -m openrlhf.cli.train_ppo_ray"], "is one word: leave out its quotes"),
        (["submit", "--", " "], "no command line of a run"),
        (["submit", "--address", "", "--", "ls"], "--address: expected the address of Ray's job server"),
        (["submit", "--working-dir", "", "--", "ls"], "--working-dir '': no such folder"),
        ([*PLAN, *run_of("--reward.remote_url=")], "the run has no reward: give one of --reward.remote_url"),
        ([*PLAN, *run_of("--help")], "--help among the arguments of train_ppo_ray: it starts no run"),
        ([*PLAN, *run_of("\u2014vllm.num_engines", "4")], "begins with a dash that is not --"),
        ([*PLAN, *run_of("--actor.model_name_or_path=")], "the run names no model"),
        (
            [*PLAN, *run_of("--actor.model_name_or_path=m\x1b[31m")],
            r"'m': the run has the models 'm\x1b[31m'",
        ),
        (
            ["plan", *CLUSTER, "--model", "m=layers:2", *run_of()],
            "missing hidden, intermediate, heads, kv_heads, vocabulary. ",
        ),
        ([*START, "--object-store-memory", "1"], "--object-store-memory 1: Ray needs"),
        (["start", "--dry-run", "--join", "[:]"], "'[:]': expected the head's HOST or HOST:PORT"),
        ([*START, "--dashboard-host", ""], "--dashboard-host '': expected an IP address"),
        (["check-network", "--size", "1e30"], "greater than 0 and at most 10^18"),
        (["certify", "--fake-gpus", ",".join(["2"] * 17)], "17 nodes: expected at most 16"),
        (["certify", "--fake-gpus", "5000"], "at least 1 and at most 1,024"),
        (["certify", "--rung", "bogus"], "no rung 'bogus'; the rungs are facts,"),
        (["doctor", "--log", ""], "argument --log: '': expected a path"),
        (["doctor", "--log", "-"], "standard input is empty"),
        (["doctor", "--freeze", "-"], "standard input is empty"),
        (["doctor", "--log", "-", "--freeze", "-"], "cannot both be read"),
        (["doctor", "--log", "/proc/self/mem"], "/proc/self/mem: Input/output error"),
        (["top", "--events", ""], "argument --events: '': expected a path"),
        (["patches", "--changes", "--json"], "--json has no effect with --changes"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[0],
)
def test_a_mistake_is_named(words: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env_vars.ACCELERATOR, "cpu")
    assert expected in require_refusal(words, code=121 if words[0] == "submit" else 2)


def test_wrong_usage_is_tested_twice_for_every_command() -> None:
    given = Counter(name for name, _, _ in WRONG_USAGE)
    assert all(given[name] >= 2 for name in commands.NAMES)


@pytest.mark.parametrize("command", [PLAN, ["tune", *PLAN[1:]]], ids=["plan", "tune"])
def test_variables_in_the_command_count_as_in_submit(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(env_vars.ALLOW_STRADDLE, raising=False)
    machines = [*command[:1], "--nodes", "2", "--gpus", "7", *command[3:]]
    trainer = [f"--{role}.num_gpus_per_node=2" for role in ("actor", "ref")]
    engines = ["--vllm.num_engines=3", "--vllm.tensor_parallel_size=4"]
    run = run_of(*trainer, "--train.colocate_actor_ref", *engines)
    assert f"{env_vars.ALLOW_STRADDLE}=1 lets" in call([*machines, *run])[1]
    allowed = call([*machines, "--", "env", f"{env_vars.ALLOW_STRADDLE}=1", *run[1:]])
    assert allowed[0] == 0, allowed
    assert env_vars.ALLOW_STRADDLE not in os.environ
    wrong = [*machines, "--", "env", f"{env_vars.ALLOW_STRADDLE}=perhaps", *run[1:]]
    assert f"{env_vars.ALLOW_STRADDLE}='perhaps': expected 0 or 1" in require_refusal(wrong)


@pytest.mark.parametrize("launcher", ["torchrun -m", "/bin/deepspeed --module", "accelerate launch -m"])
@pytest.mark.parametrize("command", [PLAN, ["submit"]], ids=["plan", "submit"])
def test_a_launcher_that_starts_a_run_once_for_each_gpu_is_refused(command: list[str], launcher: str) -> None:
    """`plan` reported that such a run fits, and `submit` submitted it."""
    words = [*command, "--", *launcher.split(), "openrlhf.cli.train_ppo_ray"]
    assert "starts train_ppo_ray once for each GPU" in require_refusal(words)


@pytest.mark.parametrize("command", [PLAN, ["tune", *PLAN[1:]], ["submit"]], ids=lambda words: words[0])
def test_an_optimiser_on_the_cpu_that_the_image_lacks_is_refused(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`plan` reported that the run fits, and its actor ended when it started."""
    monkeypatch.setattr(requirements, "missing_for", lambda _: ["nvcc"])
    assert "(no nvcc): leave the flag out" in require_refusal([*command, *run_of("--ds.adam_offload")])


@pytest.mark.parametrize("missing", [[], ["nvcc"]])
def test_a_run_has_whether_its_optimiser_can_be_on_the_cpu(
    missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_options, "missing_for", lambda name: missing if name == "cpu_adam" else [])
    run, _ = run_options.parse_run(argparse.Namespace(command_line=run_of()))
    assert run.can_offload == (not missing)
    assert run.has_fused_adam


def test_the_hints_for_all_flags_of_a_script_are_printed() -> None:
    """As a published one of OpenRLHF 0.5.1 has them: the line was cut at 2000 characters."""
    flags = [f"--{role}_num_gpus_per_node" for role in ("actor", "ref", "critic", "reward")]
    old = [word for flag in flags * 10 for word in (flag, "8")]
    assert require_refusal(["plan", *CLUSTER, *MODEL, *run_of(*old)]).count("instead of") == 40


@pytest.mark.parametrize("role", [["--head"], ["--join", "10.0.0.1"]])
@pytest.mark.parametrize("token", ["", "short", "a b" * 20, "x" * 20 + "\n" + "y" * 20])
def test_an_unusable_token_is_refused(role: list[str], token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth_token, "is_supported", lambda: True)
    monkeypatch.setenv(auth_token.MODE, "")  # the command sets it; monkeypatch removes it at the end
    monkeypatch.setenv(auth_token.TOKEN, token)
    line = require_refusal(["start", *role, "--dry-run"])
    assert "RAY_AUTH_TOKEN" in line
    assert not token or token not in line


@pytest.mark.parametrize(
    "words", [["--head", "--node-ip-address", "fd00::1"], ["--join", "[fd00::1]:6379"], ["--join", "fd00::1"]]
)
def test_an_ipv6_address_is_refused_if_ray_does_not_know_it(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["start", *words, "--auth", "none", "--dry-run"]
    assert call(command)[0] == 0
    monkeypatch.setattr(ray_private, "has_ipv6", lambda: False)
    monkeypatch.setattr(start, "_ray", lambda: "2.12.0")
    assert "accepts no IPv6 addresses" in require_refusal(command)


@pytest.mark.parametrize("stdout", ["full", "closed"])
@pytest.mark.parametrize(
    "words", [["patches"], ["--help"], ["doctor", "--freeze", "-"], ["patches", "--json"]]
)
def test_an_output_that_cannot_be_written_is_an_error(stdout: str, words: list[str]) -> None:
    redirect = ">/dev/full" if stdout == "full" else ">&-"
    command = f'echo torch==2.9.0 | "$0" -m rlhf_stack "$@" {redirect}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, *words],
        env=os.environ | {"PYTHONPATH": str(RUNTIME)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 74
    assert re.fullmatch(
        r"error: (standard output is closed|the output could not be written: .*)\n", done.stderr
    )


# fmt: off
WORDS = (
    "", " ", "nan", "NaN", "inf", "-inf", "-1", "-0.5", "1e999", "\u0663", "0x10", "1_000", "9" * 40, "two",
    "1,5", "80G", "80bananas", "--", "\0", "[/red]", "1\n2", "\u221e", "½", "1e", "1e-", "+", "1" * 5000,
    ".\u0665", "-\u0665", " \u0663 ", "1e-6_0", ".5_0",
)
# fmt: on
BAD_NUMBERS = st.sampled_from(WORDS) | st.text(
    st.characters(exclude_categories=["Nd", "Cs"]), min_size=1, max_size=30
).filter(lambda text: not text.startswith("-"))
NUMERIC = {  # options of each command, with what makes the rest of its command line valid
    "plan": (["--nodes", "--gpus", "--gpu-memory", "--cpus", "--memory"], MODEL),
    "tune": (["--nodes", "--gpus", "--gpu-memory", "--cpus", "--memory"], MODEL),
    "start": (
        ["--num-gpus", "--num-cpus", "--object-store-memory", "--port", "--expect-nodes", "--timeout"],
        ["--head", "--dry-run"],
    ),
    "check-network": (["--size", "--floor", "--timeout"], []),
    "submit": (["--gpu-memory", "--grace"], []),
    "checkpoint": (["--within"], []),
    "doctor": (["--timeout"], []),
    "reap": (["--older-than"], []),
}
WITH_RUN = ("plan", "tune", "check-network", "submit")
BAD_FLAGS = {
    "ds.zero_stage": ["4", "-1", "two", "", "2.0"],
    "train.micro_batch_size": ["0", "-1", "nan", "1e6", "\u0663", "1_0", "99999999999"],
    "rollout.micro_batch_size": ["0", "-4"],
    "ds.ring_attn_size": ["0", "-2", "3"],
    "ds.tensor_parallel_size": ["0", "-2", "5000"],
    "vllm.tensor_parallel_size": ["0", "-1", "2048"],
    "vllm.num_engines": ["-1", "10000000"],
    "vllm.gpu_memory_utilization": ["0", "-0.5", "1.5", "nan", "inf", "95"],
    "data.max_len": ["0", "-1", "999999999999"],
    "actor.adam.lr": ["nan", "-1", "inf", "1e9"],
    "actor.num_nodes": ["0", "-1", "100001"],
    "actor.num_gpus_per_node": ["0", "-1", "5000"],
    "train.max_epochs": ["0", "-1"],
    "train.batch_size": ["0", "-1"],
    "vllm.sync_backend": ["mpi", "", "NCCL "],
    "ds.attn_implementation": ["flash", "", "[red]", "flash_attention_9"],
    "ds.grad_accum_dtype": ["fp8", "float"],
    "ds.zpg": ["0", "-1"],
    "ds.lora.rank": ["-1", "10000000"],
    "rollout.temperature": ["nan", "-1", "0"],
    "algo.kl.init_coef": ["nan", "inf"],
}
NUMERIC_FLAGS = [flag for flag, default in FLAGS.items() if type(default) in (int, float)]
PATHS = (
    "FOLDER",
    "FILE/x.svg",
    "FOLDER/missing/x.svg",
    "PIPE",
    "/dev/full",
    "/dev/null",
    "",
    "\0",
    "x" * 5000,
)
FILES = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=10,
    ).map(lambda value: json.dumps(value).encode()),
)


@st.composite
def bad_command_lines(draw: st.DrawFn) -> tuple[list[str], bytes | None]:
    """A command line with one mistake, and the content of the file ``FILE`` that it may name.

    None instead of a content: standard input is closed.
    """
    kinds = ["number", "flag", "start", "svg", "file", "option", "command", "address", "input"]
    kind = draw(st.sampled_from(kinds))
    content: bytes | None = b""
    if kind == "number":
        name = draw(st.sampled_from(list(NUMERIC)))
        options, others = NUMERIC[name]
        option = draw(st.sampled_from(options))
        nodes = ["--nodes", "2"] if name in ("plan", "tune") and option != "--nodes" else []
        memory = ["--gpu-memory", "80"] if name == "tune" and option != "--gpu-memory" else []
        words = [name, *others, *nodes, *memory, f"{option}={draw(BAD_NUMBERS)}"]
    elif kind == "flag":
        words = [draw(st.sampled_from(["plan", "tune"])), *CLUSTER, *MODEL]
        wrong = st.sampled_from([(flag, value) for flag, values in BAD_FLAGS.items() for value in values])
        flag, value = draw(wrong | st.tuples(st.sampled_from(NUMERIC_FLAGS), BAD_NUMBERS))
        run = run_of(f"--{flag}={value}", start=draw(st.sampled_from(STARTS)))
        return [*words, *draw(st.sampled_from([[], ["--json"]])), *run], b""
    elif kind == "start":
        words = [draw(st.sampled_from(["plan", "tune"])), *CLUSTER, *MODEL]
        run = run_of(start=draw(st.sampled_from(NO_STARTS)))
        return [*words, *draw(st.sampled_from([[], ["--json"]])), *run], b""
    elif kind == "svg":
        words = [*PLAN, f"--svg={draw(st.sampled_from(PATHS))}"]
    elif kind == "file":
        content = draw(FILES)
        words = draw(
            st.sampled_from(
                [
                    ["plan", "--cluster", "FILE", *MODEL],
                    ["tune", *CLUSTER, "--model", "m=FILE"],
                    ["plan", *CLUSTER, "--model", "m=FILE"],
                    ["doctor", "--log", "FILE/x"],
                    ["top", "--once", "--events", "FILE"],
                ]
            )
        )
    elif kind == "input":
        content = None
        words = ["doctor", draw(st.sampled_from(["--log", "--freeze"])), "-"]
    elif kind == "option":
        words = [
            draw(st.sampled_from(commands.NAMES)),
            "--" + draw(st.from_regex(r"[a-z]{12,20}", fullmatch=True)),
        ]
    elif kind == "command":
        known = {*commands.NAMES, *commands.RENAMED}
        words = [
            draw(st.text(max_size=400).filter(lambda text: text not in known and not text.startswith("-")))
        ]
    else:
        bad = st.text(st.sampled_from("[]/ \u0663:\0\n."), min_size=1, max_size=8)
        option = draw(st.sampled_from(["--join", "--node-ip-address"]))
        head = [] if option == "--join" else ["--head"]
        words = ["start", *head, "--dry-run", f"{option}={draw(bad)}"]
    words = [*words, *draw(st.sampled_from([[], ["--json"]]))]
    return [*words, *(run_of() if words[0] in WITH_RUN and kind != "command" else [])], content


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(bad_command_lines())
def test_no_bad_command_line_is_taken_or_ends_with_a_traceback(case: tuple[list[str], bytes | None]) -> None:
    words, content = case
    with tempfile.TemporaryDirectory() as folder:
        file, pipe = Path(folder, "file"), Path(folder, "pipe")
        file.write_bytes(content or b"")
        os.mkfifo(pipe)
        places = {"FILE": str(file), "PIPE": str(pipe), "FOLDER": folder}
        named = [re.sub("|".join(places), lambda found: places[found[0]], word) for word in words]
        require_refusal(named, content and b"")


# What each variable does not accept, but for an empty value.
NO_NUMBER = (*(word for word in WORDS if word and "\0" not in word), "32M", "0x1", "1e400", "1__0")
NO_NAME = (*NO_NUMBER, "yes", "ON", "2", "auto ", "true")
VARIABLES = {
    **dict.fromkeys([env_vars.SYNC_TIMEOUT, env_vars.ENGINE_TIMEOUT, env_vars.PLACEMENT_TIMEOUT], NO_NUMBER),
    env_vars.SYNC_BUCKET: (*NO_NUMBER, "80GiB", "1B", "0", "1e9"),
    env_vars.SYNC_FULL_EVERY: (*NO_NUMBER, "0", "1.5", "1000000"),
    **dict.fromkeys([env_vars.SYNC_SOURCES, env_vars.MIN_ENGINES], (*NO_NUMBER, "0", "1.5", "1000")),
    env_vars.ENGINE_RESTARTS: (*NO_NUMBER, "1.5", "1000"),
    **dict.fromkeys(
        [*env_vars.FLAGS, env_vars.VERIFY_SYNC, env_vars.LOG_FORMAT, env_vars.LOG_LEVEL], NO_NAME
    ),
    **dict.fromkeys([env_vars.SYNC_SPARSE, env_vars.SYNC_SHARDED, env_vars.SYNC_BACKEND], NO_NAME),
}
READ_BY = {
    "plan": [*PLAN, *run_of()],
    "tune": ["tune", *CLUSTER, *MODEL, *run_of()],
    "submit": ["submit", *run_of()],
    "another program": ["submit", "--", "ls"],
    "start": START,
    "certify": ["certify", "--out", "/nowhere/certificate"],
    "check-network": ["check-network"],
}
KNOWN = ("auto", "on", "off", "nccl", "gloo", "text", "json", "info", "warning", "error", "probabilities")
# Without digits, and without what a variable of the environment cannot have.
TEXTS = st.text(st.characters(exclude_categories=["Nd", "Cs"], exclude_characters="\0"), min_size=1)


def test_every_variable_with_a_limited_value_is_in_the_fuzz() -> None:
    free = (env_vars.EVENTS, env_vars.TRACEBACK, env_vars.EXCLUDED_NODES)
    of_the_image = (env_vars.ACCELERATOR, env_vars.INPUTS, env_vars.PROFILE)
    names = {value for value in vars(env_vars).values() if str(value).startswith("RLHF_STACK_")}
    assert names == {*VARIABLES, *free, *of_the_image}


@pytest.mark.usefixtures("messages_as_before")
@settings(
    max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(list(READ_BY)),
    st.sampled_from([(name, value) for name, values in VARIABLES.items() for value in values])
    | st.tuples(st.sampled_from(list(VARIABLES)), TEXTS.filter(lambda text: text.strip() not in KNOWN)),
    st.booleans(),
)
def test_no_bad_variable_is_taken_or_ends_with_a_traceback(
    command: str, variable: tuple[str, str], is_json: bool
) -> None:
    name, value = variable
    words = [*READ_BY[command][:1], *(["--json"] if is_json else []), *READ_BY[command][1:]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        line = require_refusal(words)
    assert name in line
    assert "expected" in line or "ambiguous" in line


@pytest.mark.parametrize("command", ["plan", "tune"])
@pytest.mark.parametrize("value", ["32", "32MiB", "64MB", "0.5"])
def test_a_bucket_with_or_without_a_unit_is_planned(
    command: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env_vars.SYNC_BUCKET, value)
    assert call(READ_BY[command])[::2] == (0, "")


def test_a_bad_variable_of_the_job_alone_is_refused() -> None:
    words = ["submit", "--env", f"{env_vars.SYNC_TIMEOUT}=soon", "--", "ls"]
    assert f"{env_vars.SYNC_TIMEOUT}='soon': expected a number" in require_refusal(words)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)
KINDS = ("phase", "begins", "step", "sync", "engine", "engine restart", "recovered", "verify")
FIELDS = ("name", "step", "reward", "engine", "ranks", "restarts", "seconds", "version")
EVENTS = st.builds(
    lambda kind, time, fields: {"event": kind, "time": time} | fields,
    st.sampled_from(KINDS),
    st.floats(0, 1e9) | VALUES,
    st.dictionaries(st.sampled_from((*FIELDS, "gigabytes_per_second", "node", "gpus")), VALUES),
)


@settings(
    max_examples=EXAMPLES // 5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(EVENTS, max_size=6), FILES)
def test_no_folder_of_events_ends_top(entries: list[dict[str, Any]], content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
        Path(folder, "b.jsonl").write_bytes(content + b"\n")
        Path(folder, "c.jsonl").mkdir()
        os.mkfifo(Path(folder, "d.jsonl"))
        now = run_state(events.read_recent(Path(folder)), [], {})
    Console(file=io.StringIO()).print(top._tables(now))
