import pytest

# Each file that the patch changes is imported and finds its hooks; upstream's command line is the first user.
PROBE = """
import runpy

sys.argv = ["train_ppo_ray", "--help"]
try:
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
except SystemExit as ended:
    assert not ended.code

from rlhf_stack.diagnostics import installed_patches

(manifest,) = [found for found in installed_patches.manifests() if found["package"] == "openrlhf"]
(patch,) = [found for found in manifest["patches"] if found["name"].endswith("-import-hooks.patch")]
names = [file["path"].removesuffix(".py").replace("/", ".") for file in patch["files"]]
modules = {name: importlib.import_module(name) for name in names}
assert all(module.hooks.__name__.startswith("rlhf_stack.hooks.") for module in modules.values())
engine = modules["openrlhf.trainer.ray.vllm_engine"].ENGINE
assert hasattr(engine.__ray_metadata__.modified_class, "receive_weights"), "an engine takes no weights"
print(len(modules), "files import their hooks, and the command line prints its help")
"""


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(
            "RolloutRayActor", marks=pytest.mark.patch("openrlhf/0.11.2/0001-import-hooks"), id="0.11"
        ),
        pytest.param("LLMRayActor", marks=pytest.mark.patch("openrlhf/0.5.1/0001-import-hooks"), id="0.5"),
    ],
)
def test_the_command_line_starts_and_each_patched_file_finds_its_hooks(proves, engine):
    proves(PROBE.replace("ENGINE", engine), "NameError: name 'hooks' is not defined")
