"""The device that an image for GPUs has no driver for here, replaced in every process of a training run.

What is in place of it is in `replaced`, for each vLLM; here is what both need, and how 0.29 finds its own.
"""

import os
from importlib.metadata import version
from pathlib import Path

from rlhf_stack.config import env_vars

RELEASE = "0.29"
REPLACED = Path(__file__).with_name("replaced")
# vLLM asks each distribution on the path of each of its processes for plugins, as those of vendors are found.
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
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # made of Triton's kernels
    "HUMMING_DISABLE_PARALLEL_BUILD": "1",  # each worker starts two compilations beside it, of 0.3 GB each
}


def path(*folders: Path) -> dict[str, str]:
    """``PYTHONPATH`` with ``folders``, then `REPLACED`, before what it has."""
    inherited = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), str(REPLACED), inherited]))}


def variables(folder: Path) -> dict[str, str]:
    """What a run needs in its environment, written below ``folder``; nothing where no GPU is missed."""
    if env_vars.accelerator() == "cpu" or not version("vllm").startswith(RELEASE):
        return {}
    plugins = folder / "plugins"
    (plugins / DISTRIBUTION).mkdir(parents=True)
    for name, text in FILES.items():
        (plugins / DISTRIBUTION / name).write_text(text, encoding="utf-8")
    return VARIABLES | path(plugins)
