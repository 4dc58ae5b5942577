"""images/examples: what they run is known to the command, and the Slurm script ends as its run does."""

import copy
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import ValidationError, validate
from rlhf_stack.cli.main import _parser

from scripts.lint import shell_scripts
from scripts.matrix.load import find, load
from scripts.paths import ROOT

EXAMPLES = ROOT / "images" / "examples"
KUBERNETES = ("1.28", "1.37")  # an old one, and the newest of which the schemas are here
SLURM = EXAMPLES / "slurm.sbatch"
# Stand-ins for Slurm: a log of what was started where; `rlhf-stack start` stays until it is ended.
FAKES = {
    "scontrol": "#!/bin/bash\necho one\necho two\n",
    "srun": """#!/bin/bash
while [ "${1#--}" != "$1" ]; do
    case $1 in --nodelist=*) node=${1#--nodelist=} ;; esac
    shift
done
echo "$node: $* token=${#RAY_AUTH_TOKEN}" >> "$LOG"
case "$*" in
    *"rlhf-stack start"*) trap 'kill $!; echo "$node: ended" >> "$LOG"; exit 0' TERM
        sleep 60 > /dev/null 2>&1 & echo "$node: ready" >> "$LOG"; wait ;;
    *rlhf_stack.cluster.readiness*)
        timeout 30 bash -c 'until [ "$(grep -c ready "$LOG")" = 2 ]; do sleep 0.1; done' ;;
    *"rlhf-stack submit"*) exit 7 ;;
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


def pods() -> tuple[str, list[dict[str, Any]]]:
    """Return the version of Ray in the file for KubeRay, and its pods as sent to Kubernetes."""
    spec: dict[str, Any] = yaml.safe_load((EXAMPLES / "raycluster.yaml").read_text())["spec"]
    templates = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    common = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}}
    return spec["rayVersion"], [common | template["template"] for template in templates]


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
        (volume,) = [volume for volume in pod["volumes"] if volume["emptyDir"].get("medium") == "Memory"]
        assert mounts[volume["name"]] == "/dev/shm"


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
    return {"PATH": path, "LOG": str(tmp_path / "log"), "SLURM_JOB_NODELIST": "n[1-2]", "RUN": "in image"}


def test_the_slurm_script_starts_every_node_and_ends_with_its_run(slurm: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", SLURM, "python", "-m", "x"], env=slurm, timeout=60, check=False, capture_output=True
    )
    assert done.returncode == 7, done.stderr
    log = Path(slurm["LOG"]).read_text().splitlines()
    assert "one: in image rlhf-stack start --head --block token=64" in log
    assert "two: in image rlhf-stack start --join one --block token=64" in log
    assert "one: in image rlhf-stack submit -- python -m x token=64" in log
    assert sorted(line for line in log if line.endswith("ended")) == ["one: ended", "two: ended"]
    for line in log:
        if "rlhf-stack" in line:
            known(line.partition("in image ")[2].removesuffix(" token=64"))


def test_the_slurm_script_asks_for_a_run(slurm: dict[str, str]) -> None:
    done = subprocess.run(["bash", SLURM], env=slurm, timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no run" in done.stderr
