import pytest

PROBE = """
from rlhf_stack.diagnostics import installed_patches

(manifest,) = [found for found in installed_patches.manifests() if found["package"] == "openrlhf"]
(patch,) = [found for found in manifest["patches"] if found["name"].endswith("-import-hooks.patch")]
root = Path(importlib.util.find_spec("openrlhf").submodule_search_locations[0]).parent
paths = [file["path"] for file in patch["files"]]
without = [path for path in paths if "import openrlhf_v0_" not in (root / path).read_text()]
assert not without, f"no hooks are imported in {without}"
wrap = load("openrlhf/trainer/ray/vllm_worker_wrap.py", "wrap")
assert hasattr(wrap.WorkerWrap, "receive_weights"), "engine workers have no hooks"
print(len(paths), "files import their hooks")
"""


@pytest.mark.carries("openrlhf==0.11.2", "openrlhf==0.5.1")
def test_each_patched_file_imports_the_hooks(proves):
    proves(PROBE, "no hooks are imported in")
