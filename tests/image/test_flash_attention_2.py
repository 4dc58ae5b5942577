"""FlashAttention 2 with torch 2.3: exact functions against float64, calls of the compiled ones."""

import importlib.util
import inspect
import re
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
if not torch.__version__.startswith("2.3."):
    pytest.skip("for torch 2.3, which this cell does not have", allow_module_level=True)
if importlib.util.find_spec("flash_attn") is not None:
    pytest.skip("flash_attn is installed and is what models use", allow_module_level=True)

from rlhf_stack.compat import attention_provider, flash_attention_2  # noqa: E402  (it is skipped with another torch)

LENGTHS = (5, 9, 1, 12)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
OPTIONS = {
    "all": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (3, 0)},
    "both sides": {"window_size": (2, 1)},
    "scale": {"causal": True, "softmax_scale": 0.3},
}


def reference(q, k, v, causal=False, window_size=(-1, -1), softmax_scale=None):
    """Attention of one sequence (length, heads, head size) in float64, one query and head at a time."""
    q, k, v = (tensor.double() for tensor in (q, k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left, right = window_size
    groups = q.shape[1] // k.shape[1]
    answer = torch.zeros_like(q)
    for head in range(q.shape[1]):
        for index in range(len(q)):
            place = index + len(k) - len(q)
            keys = [
                other
                for other in range(len(k))
                if (not causal or other <= place)
                and (left < 0 or place - other <= left)
                and (right < 0 or causal or other - place <= right)
            ]
            if keys:
                weights = (scale * k[keys, head // groups] @ q[index, head]).softmax(0)
                answer[index, head] = weights @ v[keys, head // groups]
    return answer


def tensors(lengths, heads, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(sum(lengths), heads, 8).to(dtype).requires_grad_()


def offsets(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_sequences_attend_to_themselves_alone(options, kv_heads, dtype):
    """The answer and its gradients are those of each sequence alone."""
    q, k, v = (tensors(LENGTHS, heads, dtype) for heads in (4, kv_heads, kv_heads))
    places = offsets(LENGTHS)
    longest = max(LENGTHS)
    answer = flash_attention_2.flash_attn_varlen_func(q, k, v, places, places, longest, longest, **options)
    weights = torch.randn(answer.shape)
    (answer.float() * weights).sum().backward()
    gradients = [tensor.grad.clone() for tensor in (q, k, v)]
    exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    split = zip(*(tensor.split(LENGTHS) for tensor in exact), strict=True)
    expected = torch.cat([reference(*each, **options) for each in split])
    (expected * weights).sum().backward()
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(answer.double(), expected, rtol=tolerance, atol=tolerance)
    for gradient, tensor in zip(gradients, exact, strict=True):
        torch.testing.assert_close(gradient.double(), tensor.grad, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", [(6, 6), (2, 7), (7, 2)], ids=str)
def test_rows_and_other_lengths_of_keys(options, lengths):
    """The last query is aligned with the last key; one before all keys gives 0 under a causal mask."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(3, length, 2, 8) for length in (lengths[0], lengths[1], lengths[1]))
    answer = flash_attention_2.flash_attn_func(q, k, v, **options)
    for row in range(3):
        torch.testing.assert_close(
            answer[row].double(), reference(q[row], k[row], v[row], **options), rtol=0, atol=1e-5
        )


def test_what_would_be_ignored_is_refused():
    q = torch.randn(1, 3, 2, 8)
    for options in ({"dropout_p": 0.1}, {"softcap": 30.0}, {"alibi_slopes": torch.ones(2)}):
        with pytest.raises(NotImplementedError, match=next(iter(options))):
            flash_attention_2.flash_attn_func(q, q, q, **options)


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_softcapping_is_refused_on_a_gpu_too(monkeypatch, name):
    """FlashAttention 2.5.6 has none."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    q = torch.randn(3, 2, 8)
    lengths = () if name == "flash_attn_func" else (offsets([3]), offsets([3]), 3, 3)
    with pytest.raises(NotImplementedError, match="xformers, without flash_attn, does not compute softcap:"):
        getattr(flash_attention_2, name)(q, q, q, *lengths, softcap=30.0)


def test_transformers_finds_flash_attention():
    from transformers import modeling_flash_attention_utils

    assert attention_provider.is_flash_attention_2_served()
    assert modeling_flash_attention_utils.flash_attn_func is flash_attention_2.flash_attn_func


OWN_CODE = """
from transformers import LlamaForCausalLM
from transformers.utils import is_flash_attn_2_available

if is_flash_attn_2_available():
    from flash_attn import flash_attn_func


class Own(LlamaForCausalLM):
    pass
"""


def test_a_model_with_code_of_its_own_does_not_find_it(monkeypatch, tmp_path):
    """It would import flash_attn, and fail."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, dynamic_module_utils

    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=1, auto_map={"AutoModelForCausalLM": "own.Own"})
    config.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "own.py").write_text(OWN_CODE)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    loaded = AutoConfig.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_config(loaded, trust_remote_code=True)
    assert type(model).__name__ == "Own"


class Calls:
    """Stands for the compiled module: keeps the arguments, and returns what its functions return."""

    def __init__(self):
        self.made = {}

    def forward(self, name):
        def called(*arguments):
            self.made[name] = arguments
            q, k, v = arguments[:3]
            return q, q, k, v, q, torch.zeros(1), None, torch.zeros(2)

        return called

    def backward(self, name):
        def called(*arguments):
            self.made[name] = arguments
            return *(torch.zeros_like(tensor) for tensor in arguments[1:4]), torch.zeros(1)

        return called


FITS = {
    "torch.Tensor": lambda value: isinstance(value, torch.Tensor),
    "float": lambda value: isinstance(value, float),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "torch.Generator": lambda value: isinstance(value, torch.Generator),
}


def test_calls_fit_the_compiled_functions(monkeypatch):
    """Number and types of the arguments, forwards and backwards, are those of the compiled module."""
    if attention_provider.compiled_file() is None:
        pytest.skip("for xformers, which this cell does not have")
    interface = flash_attention_2.xformers_interface()
    compiled = interface.flash_attn_cuda
    calls = Calls()
    fakes = {name: calls.forward(name) for name in ("fwd", "varlen_fwd")}
    fakes |= {name: calls.backward(name) for name in ("bwd", "varlen_bwd")}
    monkeypatch.setattr(interface, "flash_attn_cuda", SimpleNamespace(**fakes))
    q, k, v = (tensors(LENGTHS, heads, torch.bfloat16) for heads in (4, 2, 2))
    options = {"softmax_scale": None, "causal": True, "window_size": (3, 0), "deterministic": False}
    rows = [tensor.unsqueeze(0) for tensor in (q, k, v)]
    interface.flash_attn_func(*rows, 0.0, **options).sum().backward()
    lengths = offsets(LENGTHS), offsets(LENGTHS), max(LENGTHS), max(LENGTHS)
    interface.flash_attn_varlen_func(q, k, v, *lengths, 0.0, **options).sum().backward()
    assert set(calls.made) == set(fakes)
    assert [tensor.shape for tensor in calls.made["bwd"][6:9]] == [tensor.shape for tensor in rows]
    for name, given in calls.made.items():
        declared = getattr(compiled, name).__doc__.splitlines()[0].partition(" -> ")[0]
        types = re.findall(r"arg\d+: ([^,)]+)", declared)
        assert len(types) == len(given), name
        for value, declared_type in zip(given, types, strict=True):
            optional = re.fullmatch(r"Optional\[(.+)\]", declared_type)
            kind = optional[1] if optional else declared_type
            assert (optional and value is None) or FITS[kind](value), (name, declared_type, value)


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_our_functions_take_the_arguments_of_flash_attn(name):
    if attention_provider.compiled_file() is None:
        pytest.skip("for xformers, which this cell does not have")
    theirs = list(inspect.signature(getattr(flash_attention_2.xformers_interface(), name)).parameters)
    own = list(inspect.signature(getattr(flash_attention_2, name)).parameters)[:-1]
    assert theirs[: len(own)] == own


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_tensors_on_a_gpu_are_given_to_xformers(monkeypatch, name):
    own, given = getattr(flash_attention_2, name), {}

    def theirs(*arguments, **options):
        given.update(inspect.signature(own).bind(*arguments, **options).arguments)
        return arguments[0]

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(flash_attention_2, "xformers_interface", lambda: SimpleNamespace(**{name: theirs}))
    inputs = tensors(LENGTHS, 2, torch.bfloat16), torch.ones(2), torch.zeros(2)
    lengths = () if name == "flash_attn_func" else (offsets(LENGTHS), offsets(LENGTHS), 4, 5)
    options = {"dropout_p": 0.1, "softmax_scale": 0.5, "causal": True, "window_size": (3, 0)}
    assert own(*inputs, *lengths, **options, deterministic=True) is inputs[0]
    assert tuple(given.values())[: 3 + len(lengths)] == (*inputs, *lengths)
    assert {key: given[key] for key in options} == options
    assert given["options"] == {"deterministic": True}
