"""The numerical tests fail with a release that is known to compute wrong gradients."""

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

# DeepSpeed 0.18.2 next to the image's own, with the operators that are compiled for the latter.
INSTALL_AND_TEST = """
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
    """Of all configurations only ZeRO-2 with accumulation fails."""
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
            ["bash", "-c", INSTALL_AND_TEST],
            environment={"PYTHONDONTWRITEBYTECODE": "1"},
            volumes=mounts,
            labels={LABEL: owner_label()},
            network_mode="host",  # as in a build: the index may be a host name of this machine
            shm_size=1024 * MEBIBYTE,
        )
        with remove_on_exit([container]):
            container.start()
            container.wait()
            output = container.logs().decode(errors="replace")
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    assert len(failed) == 1, output[-3000:]
    assert "whole_batch_is_applied[2-4]" in failed[0]
    assert "1 failed, 7 passed" in output
