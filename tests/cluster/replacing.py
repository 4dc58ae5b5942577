"""Replacement of the GPU, for which this machine has no driver, in every process of a training run.

The replacements for each vLLM are in `replaced`. This module has what both need, and how 0.29 finds its own.
"""

import os
from importlib.metadata import version
from pathlib import Path

from rlhf_stack.config import env_vars

RELEASE = "0.29"
REPLACED = Path(__file__).with_name("replaced")
# Each vLLM process loads plugins from the distributions on its path, as it finds those of vendors.
DISTRIBUTION = "replaced_device-0.dist-info"
FILES = {
    "METADATA": "Metadata-Version: 2.1\nName: replaced-device\nVersion: 0\n",
    "entry_points.txt": """\
[vllm.platform_plugins]
replaced = device_of_vllm_0_29:platform
[vllm.general_plugins]
replaced = device_of_vllm_0_29:linear_layers
""",
}
TRAINER = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
VARIABLES = {
    **TRAINER,
    env_vars.ACCELERATOR: "cpu",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # it consists of Triton's kernels
    "HUMMING_DISABLE_PARALLEL_BUILD": "1",  # each worker starts two more compilations, of 0.3 GB each
}


def path(*folders: Path) -> dict[str, str]:
    """Return ``PYTHONPATH`` with ``folders`` and `REPLACED` prepended."""
    inherited = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), str(REPLACED), inherited]))}


def variables(folder: Path) -> dict[str, str]:
    """Write the plugins below ``folder``; return a run's variables, empty if no GPU is needed."""
    if env_vars.accelerator() == "cpu" or not version("vllm").startswith(RELEASE):
        return {}
    plugins = folder / "plugins"
    (plugins / DISTRIBUTION).mkdir(parents=True)
    for name, text in FILES.items():
        (plugins / DISTRIBUTION / name).write_text(text, encoding="utf-8")
    return VARIABLES | path(plugins)
