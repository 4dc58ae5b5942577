"""rlhf-stack start, plan and submit on their own Ray cluster, with a token if that Ray supports one."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ports import free_port
from processes import END_SECONDS, MARK, marked, still_running
from rlhf_stack.cli import commands
from rlhf_stack.cluster import auth_token
from rlhf_stack.config import env_vars
from rlhf_stack.demo import tiny_model, tiny_run

SECONDS = 400
SECOND_ADDRESS = "127.0.1.2"
GPUS = 4
REFUSED = 120
QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
WRONG_USAGE = {"submit": 121, "check-network": 2, "plan": 2, "tune": 2}


def documented(result):
    """Return whether the command's help names its schema and every field that it printed."""
    _, name, version = result["schema"].split("/")
    text = " ".join(commands.load(name).__doc__.split())
    promise = text.partition(f"--json prints rlhf-stack/{name}/{version}")[2]
    inner = [entry for value in result.values() if isinstance(value, list) for entry in value]
    printed = {"schema", *result, *(key for entry in inner if isinstance(entry, dict) for key in entry)}
    return printed - {"schema", *re.findall(r"\w+", promise)} == set()


class Shell:
    """Runs ``rlhf-stack`` commands with a separate environment, home and process mark."""

    def __init__(self, folder):
        self.mark = Path(folder).name
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environment |= {MARK: self.mark, "HOME": folder, "RAY_TMPDIR": folder, "HF_HUB_OFFLINE": "1"}

    def run(self, *words, **variables):
        return subprocess.run(
            words,
            env=self.environment | variables,
            cwd=self.environment["HOME"],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    def stack(self, *arguments, **variables):
        return self.run(sys.executable, "-m", "rlhf_stack", *arguments, **variables)


@pytest.fixture(scope="module")
def shell():
    """Yield a shell; afterwards all of its processes are ended."""
    folder = tempfile.mkdtemp(prefix="rl")  # short: Ray's sockets are below it
    shell = Shell(folder)
    yield shell
    for number in marked(shell.mark):
        os.kill(number, signal.SIGKILL)
    assert still_running(shell.mark, END_SECONDS) == []
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def head(shell):
    """Return the result of ``start --head`` for a node with four fake GPUs."""
    done = shell.stack(
        "start",
        "--head",
        *("--num-gpus", str(GPUS), "--num-cpus", "8", "--port", str(free_port())),
        *("--object-store-memory", "100000000", "--expect-nodes", "1", "--expect-gpus", str(GPUS)),
        "--json",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def command(shell):
    """Return a run that fits: one step of this OpenRLHF's ``train_ppo_ray`` with a tiny model."""
    folder = Path(shell.environment["HOME"], "tiny")
    folder.mkdir()
    tiny_model.make(folder, seed=0, steps=1)
    arguments = tiny_run.train_arguments("separate", folder, 1, seed=0)
    return ["python", "-m", "openrlhf.cli.train_ppo_ray", *arguments]


@pytest.mark.timeout(SECONDS)
def test_the_head_declares_the_requested_resources_and_requires_a_token_if_ray_can(shell, head):
    assert [node["gpus"] for node in head["nodes"]] == [GPUS]
    assert head["nodes"][0]["cpus"] == 8
    assert documented(head)
    assert head["token"] == auth_token.is_supported()
    assert head["ray_start"][head["ray_start"].index("--dashboard-host") + 1] == "127.0.0.1"
    assert auth_token.path(shell.environment).is_file() == auth_token.is_supported()


@pytest.mark.timeout(SECONDS)
def test_a_client_without_the_token_is_refused(shell, head, tmp_path):
    if not head["token"]:
        pytest.skip("this Ray does not support tokens")
    stranger = shell.run("ray", "status", HOME=str(tmp_path))
    assert stranger.returncode != 0
    assert "InvalidAuthToken" in stranger.stderr
    joining = shell.stack("start", "--join", head["nodes"][0]["address"], "--dry-run", HOME=str(tmp_path))
    assert joining.returncode == 2
    assert "this machine has no token; a head has one" in joining.stderr
    messages = {
        "check-network": "InvalidAuthToken",
        "submit -- true": "it requires the head's token, which this machine does not have",
    }
    for words, message in messages.items():
        refused = shell.stack(*words.split(), HOME=str(tmp_path))
        assert refused.returncode == WRONG_USAGE[words.split()[0]], refused.stderr
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr


@pytest.mark.timeout(SECONDS)
def test_a_plan_on_the_running_cluster_reports_that_the_run_fits(shell, head, command):
    done = shell.stack("plan", "--ray", "auto", "--json", "--", *command)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    result = json.loads(done.stdout)
    assert documented(result)
    assert result["fits"]
    assert [node["address"] for node in result["nodes"]] == [head["nodes"][0]["address"]]
    assert {role["role"] for role in result["roles"]} >= {"actor"}
    assert result["gpus_needed"] == sum(bool(gpu["holds"]) for gpu in result["nodes"][0]["gpus"])


@pytest.mark.timeout(SECONDS)
def test_the_exit_code_of_a_job_is_that_of_submit(shell, head):
    seen = "print('seen', os.environ['RLHF_STACK_VERIFY_SYNC'], os.environ['OWN'])"
    code = f"import os; {seen}; raise SystemExit(7)"
    variables = {env_vars.VERIFY_SYNC: "1"}
    done = shell.stack("submit", "--env", "OWN=mine", "--", "python", "-c", code, **variables)
    assert "seen 1 mine" in done.stdout
    assert done.returncode == (7 if "exit code 7" in done.stderr else 1)
    assert "failed" in done.stderr
    assert shell.stack("submit", "--", "true").returncode == 0


@pytest.mark.timeout(SECONDS)
def test_a_run_that_cannot_be_placed_is_refused_with_the_reason(shell, head, command):
    more = "--vllm_num_engines" if "--pretrain" in command else "--vllm.num_engines"
    done = shell.stack("submit", "--json", "--", *command, more, "9")
    assert done.returncode == REFUSED, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert documented(result)
    assert not result["submitted"]
    assert result["problems"]


@pytest.mark.timeout(SECONDS)
def test_a_job_s_end_and_tuned_settings_are_reported_as_json(shell, head, command):
    done = shell.stack("submit", "--json", "--", "echo", "from the job")
    result = json.loads(done.stdout)
    assert documented(result)
    assert (result["submitted"], result["status"], result["code"]) == (True, "SUCCEEDED", 0)
    assert "from the job" in done.stderr
    done = shell.stack(
        "tune", "--nodes", "1", "--gpus", str(GPUS), "--gpu-memory", "80", "--json", "--", *command
    )
    result = json.loads(done.stdout)
    assert documented(result)
    assert result["fits"]
    assert result["command_line"][:3] == command[:3]


@pytest.mark.timeout(SECONDS)
@pytest.mark.carries("openrlhf==0.11.2")
def test_the_plan_in_the_docs_is_what_is_printed(shell):
    """tests/unit/docs compares docs/using.md with plan.console, in which ``...`` are lines left out."""
    text = Path(__file__).with_name("plan.console").read_text(encoding="utf-8")
    words, _, shown = text.removeprefix("$ rlhf-stack ").replace("\\\n", "").partition("\n")
    Path(shell.environment["HOME"], "config.json").write_text(json.dumps(QWEN), encoding="utf-8")
    printed = shell.stack(*words.split(), COLUMNS="96").stdout
    lines = [line for line in shown.splitlines() if line != "..."]
    assert list(dict.fromkeys(line for line in printed.splitlines() if line in lines)) == lines, printed
    small = shell.stack(*words.replace("--gpu-memory 80", "--gpu-memory 40").split(), COLUMNS="96")
    assert small.returncode == 1
    assert "try: --ds.zero_stage 3 --vllm.gpu_memory_utilization 0.9 " in small.stdout


@pytest.mark.timeout(SECONDS)
def test_a_user_error_on_a_running_cluster_is_one_line(shell, head, command, tmp_path):
    unused = f"127.0.0.1:{free_port()}"
    for words in (
        ["submit", "--address", f"http://{unused}", "--", "true"],
        ["submit", "--address", "nowhere", "--", "true"],
        ["submit", "--working-dir", str(tmp_path / "none"), "--", "true"],
        ["plan", "--ray", unused, "--", *command],
        ["plan", "--ray", "auto", "--", *command, "--no.such.flag"],
        ["check-network", "--", *command, "--no.such.flag"],
        ["tune", "--ray", "auto", "--", *command],
    ):
        done = shell.stack(*words)
        assert done.returncode == WRONG_USAGE[words[0]], words
        assert re.fullmatch(r"error: .+\n", done.stderr), done.stderr


@pytest.mark.timeout(SECONDS)
def test_a_second_node_joins_and_reports_both(shell, head):
    """Last of the tests on this cluster: the others need a cluster of one node."""
    done = shell.stack(
        "start",
        *("--join", address_of(head)),
        *("--node-ip-address", SECOND_ADDRESS, "--num-gpus", "2", "--num-cpus", "2"),
        *("--object-store-memory", "100000000", "--expect-nodes", "2", "--json"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    nodes = json.loads(done.stdout)["nodes"]
    assert {node["address"] for node in nodes} == {head["nodes"][0]["address"], SECOND_ADDRESS}
    assert sum(node["gpus"] for node in nodes) == GPUS + 2


@pytest.mark.timeout(SECONDS)
def test_nodes_that_do_not_join_are_reported_within_the_deadline(shell, head):
    done = shell.stack(
        "start",
        *("--join", address_of(head), "--node-ip-address", "127.0.1.3", "--num-gpus", "1", "--num-cpus", "1"),
        *("--object-store-memory", "100000000", "--expect-nodes", "9", "--timeout", "3"),
    )
    assert done.returncode == 1
    assert "of 9 nodes joined" in done.stderr


def address_of(head):
    """Return the head's address with its port."""
    words = head["ray_start"]
    return f"{head['nodes'][0]['address']}:{words[words.index('--port') + 1]}"
