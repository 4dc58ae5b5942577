"""images/examples: what they run is known to the command, and the Slurm script ends as its run does."""

import copy
import os
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import ValidationError, validate
from rlhf_stack.cli.main import _parser
from rlhf_stack.openrlhf.request import request_of
from rlhf_stack.placement.model import FreeNode, Request
from rlhf_stack.placement.planner import plan

from scripts.lint import shell_scripts
from scripts.matrix.load import find, load
from scripts.paths import ROOT
from tests.unit.openrlhf_arguments import sections

EXAMPLES = ROOT / "images" / "examples"
KUBERNETES = ("1.28", "1.37")  # an old one, and the newest of which the schemas are here
SLURM = EXAMPLES / "slurm.sbatch"
# Stand-ins for Slurm: a log of what was started where; `rlhf-stack start` stays until it is ended.
FAKES = {
    "scontrol": """#!/bin/bash
case $1 in requeue) echo "requeue $2" >> "$LOG" ;; *) echo one; echo two ;; esac
""",
    "squeue": '#!/bin/bash\necho "${STATE:-RUNNING}"\n',
    "srun": """#!/bin/bash
while [ "${1#--}" != "$1" ]; do
    case $1 in --nodelist=*) node=${1#--nodelist=} ;; esac
    shift
done
echo "$node: $* token=${#RAY_AUTH_TOKEN} $RAY_TMPDIR" >> "$LOG"
case "$*" in
    *"rlhf-stack start"*) trap 'kill $!; echo "$node: ended" >> "$LOG"; exit 0' TERM
        sleep 60 > /dev/null 2>&1 & echo "$node: ready" >> "$LOG"; wait ;;
    *rlhf_stack.cluster.readiness*)
        timeout 30 bash -c 'until [ "$(grep -c ready "$LOG")" = 2 ]; do sleep 0.1; done' ;;
    *"rlhf-stack submit"*) [ -z "${PREEMPTED:-}" ] || { kill -TERM $PPID; exec sleep 30 > /dev/null 2>&1; }
        exit "${CODE:-7}" ;;
esac
""",
}


def known(command: str) -> None:
    """`rlhf-stack` takes this command line."""
    words = shlex.split(command)
    assert words[0] == "rlhf-stack"
    _parser(words[1:]).parse_args(words[1:])


def test_the_services_of_compose_start_a_head_and_a_node_that_joins_it() -> None:
    services: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]
    assert set(services) == {"head", "node"}
    for service in services.values():
        known(service["command"])
        assert "RAY_AUTH_TOKEN" in service["environment"]
        assert service["shm_size"]
        assert service["image"].endswith(f":{load().default}}}")
    assert "--join head" in services["node"]["command"]
    assert f"--expect-nodes {len(services)}" in services["head"]["command"]


def test_each_gpu_service_of_compose_has_gpus_locked_memory_and_the_adapters() -> None:
    services: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose.gpu.yaml").read_text())["services"]
    assert set(services) == {"head", "node"}
    for service in services.values():
        known(service["command"].replace("${HEAD:-head}", "head"))
        (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert devices == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        assert service["ulimits"] == {"memlock": -1}
        assert service["devices"] == ["/dev/infiniband"]
        assert (service["network_mode"], service["shm_size"]) == ("host", "64gb")
        assert {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RAY_AUTH_TOKEN"} <= set(service["environment"])
        tag = service["image"].rpartition(":")[2].removesuffix("}")
        assert find(load(), tag).accelerator.kind == "cuda"


def placement(command: str) -> Request:
    """Return what a command of OpenRLHF 0.11.2 requests, which trains no critic and has a remote reward."""
    words = shlex.split(command)
    values: dict[str, Any] = {}
    for word, after in pairwise([*words, "--"]):
        group, _, name = word.removeprefix("--").partition(".")
        if word.startswith("--") and group in ("actor", "ref", "reward", "train", "vllm"):
            values[f"{group}__{name}"] = True if after.startswith("--") else after
    sizes = {name: int(value) for name, value in values.items() if str(value).isdigit()}
    request, _ = request_of(sections(**values | sizes, critic__model_name_or_path=None))
    return request


def kuberay(file: str) -> dict[str, Any]:
    """Return the specification of the cluster in a file for KubeRay."""
    spec: dict[str, Any] = yaml.safe_load((EXAMPLES / file).read_text())["spec"]
    cluster: dict[str, Any] = spec.get("rayClusterSpec", spec)
    return cluster


def pods() -> tuple[str, list[dict[str, Any]]]:
    """Return the version of Ray in the files for KubeRay, and their pods as sent to Kubernetes."""
    specs = [kuberay(file) for file in ("raycluster.yaml", "rayjob.yaml")]
    (release,) = {spec["rayVersion"] for spec in specs}
    templates = [group for spec in specs for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    common = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}}
    return release, [common | template["template"] for template in templates]


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_the_pods_of_kuberay(version: str) -> None:
    """The pods are valid by Kubernetes' own schemas, in which an unknown field is an error."""
    for pod in pods()[1]:
        validate(pod, version, strict=True)
        misspelt = copy.deepcopy(pod)
        misspelt["spec"]["containers"][0]["volumeMount"] = []
        with pytest.raises(ValidationError, match="volumeMount"):
            validate(misspelt, version, strict=True)


def test_the_pods_of_kuberay_have_shared_memory_and_no_rights_that_they_do_not_need() -> None:
    release, found = pods()
    for pod in (each["spec"] for each in found):
        assert pod["securityContext"]["runAsNonRoot"]
        (container,) = pod["containers"]
        name, _, tag = container["image"].partition(":")
        assert name == "rlhf-stacks"
        assert find(load(), tag).accelerator.kind == "cuda"
        assert tag.startswith(f"ray{release}-")
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"] == container["resources"]["limits"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        (volume,) = [volume for volume in pod["volumes"] if "emptyDir" in volume]
        assert volume["emptyDir"]["medium"] == "Memory"
        assert mounts[volume["name"]] == "/dev/shm"
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}


def test_the_job_of_kuberay_reads_and_writes_on_its_claim() -> None:
    """Every pod has the claim and the secret; the flags are OpenRLHF's."""
    spec: dict[str, Any] = yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text())["spec"]
    launcher, module, name, *words = shlex.split(spec["entrypoint"])
    assert (launcher, module, name) == ("python", "-m", "openrlhf.cli.train_ppo_ray")
    published = (ROOT / "tests" / "cluster" / "published" / "openrlhf-0.11.2.toml").read_text()
    for word in words:
        assert not word.startswith("--") or f"{word} " in published or f"{word}\n" in published
    assert {word.split("/")[1] for word in words if word.startswith("/")} == {"data"}
    cluster = kuberay("rayjob.yaml")
    (workers,) = cluster["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    known(shlex.join(hook))
    assert int(hook[-1]) < pod["terminationGracePeriodSeconds"]
    for template in (cluster["headGroupSpec"]["template"], workers["template"]):
        (container,) = template["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "rlhf"}}]
        assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"]
        assert template["spec"]["volumes"][1]["persistentVolumeClaim"]["claimName"]
    (container,) = workers["template"]["spec"]["containers"]
    assert "vpc.amazonaws.com/efa" in container["resources"]["limits"]


def test_the_job_of_kuberay_has_room_on_its_workers() -> None:
    """A role that the command does not mention takes GPUs too, such as the reference model."""
    entrypoint = yaml.safe_load((EXAMPLES / "rayjob.yaml").read_text())["spec"]["entrypoint"]
    (workers,) = kuberay("rayjob.yaml")["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    cpus, gpus = (float(container["resources"]["limits"][name]) for name in ("cpu", "nvidia.com/gpu"))
    nodes = [FreeNode(f"10.0.0.{number}", gpus, cpus, gpus) for number in range(workers["replicas"])]
    request = placement(entrypoint)
    assert plan(nodes, request).straddling == ()
    assert request.size == sum(node.gpus for node in nodes)


def test_the_slurm_script_is_a_shells() -> None:
    """`lint` checks it like every other shell script."""
    assert shell_scripts([SLURM]) == [SLURM]
    subprocess.run(["bash", "-n", SLURM], check=True)


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment with a Slurm of two nodes that only logs its arguments."""
    for name, text in FAKES.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {"PATH": path, "LOG": str(tmp_path / "log"), "SLURM_JOB_NODELIST": "n[1-2]", "RUN": "in image"} | {
        "SLURM_JOB_ID": "42",
        "SLURM_GPUS_ON_NODE": "8",
    }


def batch(environment: dict[str, str], *run: str) -> subprocess.CompletedProcess[str]:
    """Run the Slurm script for ``run`` to its end."""
    return subprocess.run(
        ["bash", SLURM, *run], env=environment, timeout=60, check=False, capture_output=True, text=True
    )


def test_the_slurm_script_starts_every_node_and_ends_with_its_run(slurm: dict[str, str]) -> None:
    done = batch(slurm, "python", "-m", "x")
    assert done.returncode == 7, done.stderr
    log = Path(slurm["LOG"]).read_text().splitlines()
    ending = "token=64 /tmp/ray-42"
    assert f"one: in image rlhf-stack start --head --block {ending}" in log
    assert f"two: in image rlhf-stack start --join one --block {ending}" in log
    assert f"one: in image rlhf-stack submit -- python -m x {ending}" in log
    assert any("cluster.readiness --nodes 2 --gpus 16 " in line for line in log)
    assert not any("rm -rf" in line for line in log), "the logs of a run that failed are kept"
    assert sorted(line for line in log if line.endswith("ended")) == ["one: ended", "two: ended"]
    for line in log:
        if "rlhf-stack" in line:
            known(line.partition("in image ")[2].removesuffix(f" {ending}"))


def test_the_slurm_script_removes_its_folder_after_a_run_that_succeeded(slurm: dict[str, str]) -> None:
    done = batch(slurm | {"CODE": "0"}, "python", "-m", "x")
    assert done.returncode == 0, done.stderr
    *_, last = Path(slurm["LOG"]).read_text().splitlines()
    assert "rm -rf /tmp/ray-42" in last, "the nodes have ended before"


@pytest.mark.parametrize(
    ("state", "flags", "requeued"),
    [
        ("RUNNING", ["--ckpt.load_enable"], ["requeue 42"]),
        ("RUNNING", [], []),  # it would begin again
        ("COMPLETING", ["--ckpt.load_enable"], []),  # scancel
    ],
)
def test_the_slurm_script_saves_a_checkpoint_when_it_is_preempted_and_is_requeued(
    slurm: dict[str, str], state: str, flags: list[str], requeued: list[str]
) -> None:
    done = batch(slurm | {"PREEMPTED": "1", "STATE": state}, "python", "-m", "x", *flags)
    assert done.returncode == 143, done.stderr
    log = Path(slurm["LOG"]).read_text().splitlines()
    (saved,) = [line for line in log if "rlhf-stack checkpoint" in line]
    command = saved.partition("in image ")[2].partition(" token=")[0]
    known(command)
    assert [line for line in log[log.index(saved) :] if line.startswith("requeue")] == requeued
    assert sorted(line for line in log[log.index(saved) :] if line.endswith("ended")) == [
        "one: ended",
        "two: ended",
    ]


def test_the_slurm_script_requests_gpus_and_a_time_limit() -> None:
    """And all memory of the nodes, which they do not give to a job that only excludes others."""
    options = {
        line.split()[1].partition("=")[0]: line.partition("=")[2]
        for line in SLURM.read_text().splitlines()
        if line.startswith("#SBATCH")
    }
    assert options["--gres"].startswith("gpu:")
    assert options["--mem"] == "0"
    assert options["--time"]
    notice = int(options["--signal"].removeprefix("B:TERM@"))
    within = int(SLURM.read_text().partition("checkpoint --within ")[2].split()[0])
    assert within < notice


def test_the_slurm_script_asks_for_a_run(slurm: dict[str, str]) -> None:
    done = batch(slurm)
    assert done.returncode == 2
    assert "no run" in done.stderr
