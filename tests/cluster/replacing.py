"""Replacement of the GPU, for which this machine has no driver, in every process of a training run.

The replacements for each vLLM are in `replaced`. This module has what both need, and how 0.29 finds its own.
"""

import os
from importlib.metadata import version
from pathlib import Path

from rlhf_stack.config import env_vars

RELEASE = "0.29"
TESTS = Path(__file__).parent
REPLACED = TESTS / "replaced"
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
    """Return ``PYTHONPATH`` with ``folders``, `TESTS` and `REPLACED` prepended."""
    inherited = os.environ.get("PYTHONPATH", "")
    folders = *folders, TESTS, REPLACED
    return {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), inherited]))}


def is_needed() -> bool:
    """Return whether the image has GPUs and a vLLM that finds its replacements as plugins."""
    return env_vars.accelerator() != "cpu" and version("vllm").startswith(RELEASE)


def variables(folder: Path) -> dict[str, str]:
    """Return the variables of a run, whose processes can import the modules of this folder.

    If a GPU is needed, write the plugins below ``folder``.
    """
    if not is_needed():
        return path()
    plugins = folder / "plugins"
    (plugins / DISTRIBUTION).mkdir(parents=True)
    for name, text in FILES.items():
        (plugins / DISTRIBUTION / name).write_text(text, encoding="utf-8")
    return VARIABLES | path(plugins)
