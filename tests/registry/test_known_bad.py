"""The tests of numbers catch a release that is known to compute wrong ones, when it is put in."""

import tempfile
from pathlib import Path

import docker
import pytest
from docker.models.images import Image

from scripts.images.build import write_secrets
from scripts.locks import index_config
from scripts.matrix.load import Cell
from scripts.paths import ROOT
from scripts.testing import in_image
from scripts.testing.cluster import LABEL, MEBIBYTE, owner_label, remove_on_exit

# 0.18.2 beside the image's own, with the operators that are compiled for that.
PUT_IN = """
set -e
[ ! -s /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca
export PIP_CONFIG_FILE=/run/secrets/pip PIP_CONSTRAINT=
pip install --quiet --no-deps --target /tmp/old deepspeed==0.18.2
cd "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/deepspeed"
cp --parents $(find . -name '*.so') /tmp/old/deepspeed/
cp git_version_info_installed.py /tmp/old/deepspeed/
export PYTHONPATH=/tmp/old:/opt/testing
exec python -m pytest -p no:cacheprovider -c /dev/null --rootdir=/opt/tests -ra \
    /opt/tests/cluster/test_numbers.py -k gradient
"""


@pytest.mark.timeout(900)
def test_a_deepspeed_that_loses_accumulated_gradients_is_caught(
    client: docker.DockerClient, cell: Cell, image: Image
) -> None:
    """ZeRO-2 with accumulation is wrong, and nothing else is."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        secrets = write_secrets(index_config.load(), Path(folder))
        mounts = {str(path): {"bind": f"/run/secrets/{name}", "mode": "ro"} for name, path in secrets.items()}
        mounts |= {
            str(ROOT / "tests"): {"bind": "/opt/tests", "mode": "ro"},
            str(in_image.test_tools(cell)): {"bind": "/opt/testing", "mode": "ro"},
        }
        container = client.containers.create(
            str(image.id),
            ["bash", "-c", PUT_IN],
            environment={"PYTHONDONTWRITEBYTECODE": "1"},
            volumes=mounts,
            labels={LABEL: owner_label()},
            network_mode="host",  # as a build has it: the index may be a name of this machine
            shm_size=1024 * MEBIBYTE,
        )
        with remove_on_exit([container]):
            container.start()
            container.wait()
            said = container.logs().decode(errors="replace")
    failed = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert len(failed) == 1, said[-3000:]
    assert "whole_batch[2-4]" in failed[0]
    assert "1 failed, 7 passed" in said
