"""Attention without flash-attn: packed and padded samples against each sequence alone."""

import gc
import importlib.util

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("torch.nn.attention.varlen") is None:
    pytest.skip("this torch has no variable-length attention", allow_module_level=True)
if importlib.util.find_spec("flash_attn") is not None:
    pytest.skip("flash_attn is installed and is what models use", allow_module_level=True)

import flash_kernel  # noqa: E402
import transformers  # noqa: E402  (it is skipped where torch is too old)
from rlhf_stack.compat import flash_attention, varlen_attention  # noqa: E402

LENGTHS = (5, 9, 1, 12)
TOLERANCE = 2e-5  # float32, gradients of a sum of squares
MODELS = {
    "equal heads": {"num_key_value_heads": 4},
    "grouped queries": {"num_key_value_heads": 2},
    "sliding window": {
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 0,
    },
}


def model(options, implementation):
    """A small Qwen2 with weights from one seed, without a cache of keys and values."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
        attn_implementation=implementation,
        **options,
    )
    return transformers.Qwen2ForCausalLM(config)


def sequences():
    torch.manual_seed(1)
    return [torch.randint(1, 64, (1, length)) for length in LENGTHS]


def gradients(tried):
    return {name: parameter.grad.clone() for name, parameter in tried.named_parameters()}


def compared(logits, tried, options):
    """Logits and gradients against those of eager attention for each sequence alone."""
    reference = model(options, "eager")
    expected = [reference(one).logits[0] for one in sequences()]
    torch.cat(expected).square().sum().backward()
    logits.square().sum().backward()
    torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=TOLERANCE)
    wanted = gradients(reference)
    for name, gradient in gradients(tried).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=TOLERANCE * 10, msg=name)


@pytest.fixture(params=["CPU", "GPU"])
def served(request, monkeypatch):
    """The name of the implementation that OpenRLHF's default gives to models, on its path for each device."""
    name = varlen_attention.implementation("flash_attention_2")
    assert name == varlen_attention.NAME
    if request.param == "CPU":
        yield name
        return
    monkeypatch.setattr(varlen_attention, "_attend_one_by_one", varlen_attention._attend_on_gpu)
    with flash_kernel.installed():
        yield name


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_values_that_are_smaller_than_keys(causal, window):
    """Multi-head latent attention; the kernel takes one head size."""
    torch.manual_seed(3)
    query, key, value = torch.randn(9, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 8)
    two = varlen_attention._sequences(1, 9, None, torch.tensor([[*range(5), *range(4)]]), query.device)
    layer = varlen_attention._Layer(query, key, value, two, None, window, causal)
    with flash_kernel.installed():
        found = varlen_attention._attend_on_gpu(layer)
    torch.testing.assert_close(found, varlen_attention._attend_one_by_one(layer))


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask of ones"])
def test_packed_sequences_do_not_attend_to_each_other(served, options, masked):
    tried = model(options, served)
    packed = torch.cat(sequences(), dim=1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
    mask = torch.ones_like(packed) if masked else None
    compared(tried(packed, position_ids=positions, attention_mask=mask).logits[0], tried, options)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_attended_to(served, options, side):
    tried = model(options, served)
    longest = max(LENGTHS)
    ids, mask = torch.zeros(len(LENGTHS), longest, dtype=torch.long), torch.zeros(len(LENGTHS), longest)
    for row, one in enumerate(sequences()):
        at = slice(longest - one.shape[1], longest) if side == "left" else slice(0, one.shape[1])
        ids[row, at], mask[row, at] = one[0], 1
    positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 1)  # as OpenRLHF computes them
    logits = tried(ids, attention_mask=mask, position_ids=positions).logits
    compared(logits[mask.bool()], tried, options)


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask of ones"])
def test_sequences_are_computed_once_per_pass_and_not_kept_after_it(served, monkeypatch, masked):
    """Both layers of the model use one computation, also those that gradient checkpointing runs again."""
    computed = []
    compute = varlen_attention._sequences
    monkeypatch.setattr(
        varlen_attention, "_sequences", lambda *inputs: computed.append(1) or compute(*inputs)
    )
    tried = model(MODELS["grouped queries"], served)
    tried.gradient_checkpointing_enable()
    tried.train()
    packed = torch.cat(sequences(), dim=1)

    def passed(positions):
        mask = torch.ones_like(packed) if masked else None
        return tried(packed, position_ids=positions, attention_mask=mask, use_cache=False).logits

    positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
    before = passed(positions)
    before.sum().backward()
    assert len(computed) == 1
    positions.copy_(torch.arange(positions.numel()))  # the same tensor, now one sequence
    assert not torch.equal(passed(positions), before)
    assert len(computed) == 2
    del positions, before
    gc.collect()
    assert not len(varlen_attention._passes())


def test_half_precision_is_near_the_reference(served):
    """bf16 has 8 bits: 2 % of the largest logit."""
    packed = torch.cat(sequences(), dim=1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
    options = MODELS["grouped queries"]
    exact = torch.cat([model(options, "eager")(one).logits[0] for one in sequences()])
    half = model(options, served).to(torch.bfloat16)(packed, position_ids=positions).logits[0].float()
    assert (half - exact).abs().max() < 0.02 * exact.abs().max()


def test_features_that_would_be_ignored_are_refused():
    layer = torch.nn.Module()
    layer.is_causal = True
    query = torch.randn(1, 2, 4, 8)
    for options, feature in (
        ({"dropout": 0.1}, "dropout"),
        ({"softcap": 30.0}, "softcapping"),
        ({"s_aux": torch.zeros(2)}, "sinks"),
        ({"key": torch.randn(1, 2, 9, 8)}, "cache"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "mask per pair"),
    ):
        arguments = {"query": query, "key": query, "value": query, "attention_mask": None} | options
        with pytest.raises(varlen_attention.UnsupportedAttentionError, match=feature):
            varlen_attention.forward(layer, **arguments)


def test_a_model_that_transformers_refuses_to_load_with_flash_attention_is_refused(served):
    """Llama 4 attends in chunks, which FlashAttention ignores: it would train with other attention."""
    config = transformers.Llama4TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
    )
    for implementation in ("sdpa", served):
        config._attn_implementation = implementation
        whole = torch.nn.ModuleList([transformers.Llama4ForCausalLM(config)])
        if implementation == "sdpa":
            varlen_attention.check_model(whole, packed=False)
    with pytest.raises(
        varlen_attention.UnsupportedAttentionError, match="Llama4ForCausalLM does not support"
    ):
        varlen_attention.check_model(whole, packed=False)
    varlen_attention.check_model(model(MODELS["grouped queries"], served), packed=True)


def test_packed_samples_of_a_model_with_linear_attention_are_refused(served):
    """Its state passes from one sample to the next: the first sample is right, the second is not."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    tried = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=served).float().eval()
    first, second = sequences()[:2]
    positions = torch.cat([torch.arange(one.shape[1]) for one in (first, second)]).unsqueeze(0)
    with torch.no_grad():
        packed = tried(torch.cat([first, second], dim=1), position_ids=positions, use_cache=False).logits[0]
        alone = [tried(one, use_cache=False).logits[0] for one in (first, second)]
    torch.testing.assert_close(packed[: len(alone[0])], alone[0], rtol=0, atol=TOLERANCE)
    assert (packed[len(alone[0]) :] - alone[1]).abs().max() > 100 * TOLERANCE
    varlen_attention.check_model(tried, packed=False)
    with pytest.raises(varlen_attention.UnsupportedAttentionError, match=r"leave out --ds\.packing_samples"):
        varlen_attention.check_model(tried, packed=True)


def test_layers_with_convolutions_are_refused_in_packed_samples_too():
    """LFM2, which transformers does not call stateful."""
    tried = model(MODELS["grouped queries"], "sdpa")
    tried.config.layer_types = ["conv", "full_attention"]
    varlen_attention.check_model(tried, packed=False)
    with pytest.raises(
        varlen_attention.UnsupportedAttentionError, match="passes a state from token to token"
    ):
        varlen_attention.check_model(tried, packed=True)


def test_queries_of_a_quantized_model_get_the_dtype_that_it_computes_in():
    """Weights of 4 bits are stored as uint8."""
    tried = model(MODELS["grouped queries"], "sdpa").to(torch.bfloat16)
    layer = tried.model.layers[0].self_attn
    assert varlen_attention._half_precision(layer) == torch.bfloat16
    for linear in (part for part in layer.modules() if isinstance(part, torch.nn.Linear)):
        linear.weight = torch.nn.Parameter(linear.weight.to(torch.uint8), requires_grad=False)
    tried.config._is_quantized, tried.config.dtype = True, torch.float16
    assert varlen_attention._half_precision(layer) == torch.float16


def test_padding_is_removed_and_restored():
    torch.manual_seed(2)
    states = torch.randn(3, 4, 2, requires_grad=True)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]])
    tokens, indices, offsets, longest, lengths = flash_attention.unpad_input(states, mask)
    assert (offsets.tolist(), longest, lengths.tolist()) == ([0, 2, 6, 7], 4, [2, 4, 1])
    assert offsets.dtype == torch.int32
    torch.testing.assert_close(tokens, torch.cat([states[0, 2:], states[1], states[2, :1]]))
    restored = flash_attention.pad_input(tokens, indices, 3, 4)
    torch.testing.assert_close(restored, states * mask.unsqueeze(-1))
    restored.sum().backward()
    torch.testing.assert_close(states.grad, mask.unsqueeze(-1).expand(3, 4, 2).float())


def test_another_implementation_is_left_unchanged():
    assert varlen_attention.implementation("sdpa") == "sdpa"
    assert varlen_attention.implementation("flash_attention_3") == "flash_attention_3"
