"""Code that vLLM compiles for one GPU, and that an engine on another GPU finds."""

import pytest

COMPILED = """
os.environ.update(VLLM_CACHE_ROOT=str(Path("cache").resolve()), VLLM_USE_AOT_COMPILE="1")
os.environ.pop("TORCH_COMPILE_DISABLE", None)

import torch
from vllm.compilation.decorators import support_torch_compile
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import CompilationConfig, CompilationMode, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context

gpu = 0


def seen_by_vllm():  # torch itself keeps the tensors of this probe on the CPU
    return sys._getframe(1).f_globals["__name__"].startswith("vllm.compilation")


replace(PostGradPassManager, __call__=lambda self, graph: None)  # its operators need a driver
replace(torch.accelerator, is_available=seen_by_vllm, current_device_index=lambda: gpu)


@support_torch_compile
class Model(torch.nn.Module):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1


def start():
    compiled = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode="NONE", compile_sizes=[])
    config = VllmConfig(compilation_config=compiled, device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config), set_forward_context({}, config), torch.inference_mode():
        model = Model(vllm_config=config)
        assert model(torch.zeros(8)).tolist() == [1.0] * 8
    return model.was_aot_compile_fn_loaded_from_disk


assert not start(), "the first engine has nothing to load"
assert start(), "an engine on the same GPU has to compile again"
gpu = 4
assert not start(), "rank 0 of an engine on GPU 4 loads what was compiled for GPU 0"
assert start()
print("each GPU has its own compiled code")
"""


@pytest.mark.patch("vllm/0.29.0/0003-keep-compiled-code-per-gpu")
def test_an_engine_loads_only_what_was_compiled_for_its_gpu(proves):
    proves(COMPILED, "loads what was compiled for GPU 0")
