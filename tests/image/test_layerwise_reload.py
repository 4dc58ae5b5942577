"""What `rlhf_stack.engine.layerwise_reload` uses of vLLM's reload of layers, which vLLM does not document."""

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.carries("openrlhf==0.11.2")

PARAMETERS = {
    "layerwise.initialize_layerwise_reload": ["model"],
    "layerwise.finalize_layerwise_processing": ["model", "model_config"],
    "layerwise.get_layerwise_info": ["layer"],
    "layerwise._layerwise_process": ["layer", "info"],
    "layerwise.get_numel_loaded": ["weight_loader", "args"],
    "layerwise._get_original_loader": ["tensor"],
    "layerwise._get_weight_loader": ["tensor"],
    "meta.materialize_meta_tensor": ["meta_tensor"],
    "utils.get_layer_tensors": ["layer"],
}
NOT_CHECKED = {"layerwise.finalize_layerwise_reload": "it passes its arguments on to ..._processing"}


@pytest.fixture
def reload():
    """vLLM's package."""
    from vllm.model_executor.model_loader import reload
    from vllm.model_executor.model_loader.reload import layerwise, meta, utils  # noqa: F401

    return reload


@pytest.fixture
def used():
    """The attributes that the source uses of each name: "layerwise", "meta", "utils" and "info"."""
    source = Path(find_spec("rlhf_stack.engine.layerwise_reload").origin).read_text()
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.setdefault(node.value.id, set()).add(node.attr)
    return found


def test_every_name_that_is_used_is_there(reload, used):
    from vllm.model_executor.layers import attention

    missing = [
        f"{module}.{name}"
        for module in ("layerwise", "meta", "utils")
        for name in used[module]
        if not hasattr(getattr(reload, module), name)
    ]
    assert missing == []
    assert list(inspect.signature(attention.is_deferred_attention_layer).parameters) == ["layer"]


def test_every_function_that_is_used_takes_the_same_arguments(reload, used):
    called = {
        f"{module}.{name}"
        for module in ("layerwise", "meta", "utils")
        for name in used[module]
        if inspect.isfunction(getattr(getattr(reload, module), name))
    }
    assert called - NOT_CHECKED.keys() <= PARAMETERS.keys(), "a function whose arguments are not known here"
    for name, parameters in PARAMETERS.items():
        module, function = name.split(".")
        assert list(inspect.signature(getattr(getattr(reload, module), function)).parameters) == parameters


def test_the_record_of_a_layer_has_each_field_that_is_used(reload, used):
    info = reload.layerwise.get_layerwise_info(torch.nn.Linear(2, 2))
    assert [name for name in used["info"] if not hasattr(info, name)] == []
    assert (info.loaded_weights, info.load_numel, info.kernel_tensors) == ([], 0, None)
    assert info.can_load() is False
    assert "e_score_correction_bias" in reload.meta.SKIP_LOAD_TENSORS


def test_a_loader_that_collects_has_the_name_and_the_entries_that_are_expected(reload):
    from rlhf_stack.engine.layerwise_reload import WRAPPER

    def load(param, loaded_weight):
        param.data.copy_(loaded_weight)

    layer = torch.nn.Linear(2, 2)
    layer.weight.weight_loader = load
    before = layer.weight
    reload.layerwise.record_metadata_for_reloading(layer)
    reload.layerwise.initialize_layerwise_reload(layer)
    info = reload.layerwise.get_layerwise_info(layer)
    assert info.can_load()
    assert layer.weight.is_meta
    assert info.kernel_tensors[0]["weight"] is before
    assert set(reload.utils.get_layer_tensors(layer)) == {"weight", "bias"}
    loader = reload.layerwise._get_weight_loader(layer.weight)
    assert loader.__name__ == WRAPPER
    assert loader.__wrapped__ is load
    assert reload.layerwise._get_original_loader(layer.weight) is load
    loader(layer.weight, torch.ones(2, 2))
    ((name, arguments),) = info.loaded_weights
    assert name == "weight"
    assert isinstance(arguments, inspect.BoundArguments)
    assert arguments.arguments["param"] is layer.weight
    assert 0 < info.load_numel < info.load_numel_total, "the bias is missing, so that nothing is loaded yet"
    value = reload.meta.materialize_meta_tensor(layer.weight)
    assert (value.is_meta, value.shape, value.dtype) == (False, (2, 2), torch.float32)
