"""rlhf_stack.memory: sizes of known models, and properties of all. Tests in the image compare with torch."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from rlhf_stack.memory import (
    EngineSettings,
    Pass,
    Shape,
    ShapeError,
    Zero,
    forward_peak,
    kv_cache,
    model_states,
    parse_shape,
    read_shape,
    saved_activations,
    training_peak,
)
from rlhf_stack.memory.engine import engine_weights, reload_memory, sync_memory, token_bytes
from rlhf_stack.memory.model_shape import shape_from_config
from rlhf_stack.memory.training import BYTES_16BIT

GIB = 1 << 30
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
SMALL_QWEN = QWEN | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3 = LLAMA | {
    "model_type": "qwen3",
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "head_dim": 128,
    "vocab_size": 151936,
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
LLAMA_70B = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN3_235B = QWEN3 | {
    "model_type": "qwen3_moe",
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
# The exact numbers that their publishers state.
KNOWN = [
    (LLAMA, 8_030_261_248),
    (QWEN, 7_615_616_512),
    (SMALL_QWEN, 494_032_768),
    (QWEN3, 8_190_735_360),
    (MIXTRAL, 46_702_792_704),
]
SHAPES = st.builds(
    Shape,
    layers=st.integers(1, 80),
    hidden=st.sampled_from([64, 896, 4096]),
    intermediate=st.sampled_from([128, 4864, 14336]),
    heads=st.sampled_from([8, 16, 64]),
    kv_heads=st.sampled_from([1, 2, 8]),
    head_dim=st.sampled_from([32, 128]),
    vocabulary=st.sampled_from([512, 32000, 151936]),
    tied=st.booleans(),
    experts=st.sampled_from([0, 8]),
    active=st.just(2),
)
ZEROS = st.builds(
    Zero,
    stage=st.integers(0, 3),
    ranks=st.integers(1, 64),
    offload=st.booleans(),
    fp32_gradients=st.booleans(),
    overlap=st.booleans(),
)
PASSES = st.builds(
    Pass,
    sequences=st.integers(1, 16),
    length=st.integers(1, 8192),
    checkpointing=st.booleans(),
    attention=st.sampled_from(["eager", "sdpa", "flash_attention_2"]),
    split=st.sampled_from([1, 2, 4]),
    value_head=st.booleans(),
    half_precision_logits=st.booleans(),
)
PARAMETERS = st.integers(1, 10**11)


@pytest.mark.parametrize(("config", "parameters"), KNOWN, ids=lambda value: str(value)[:30])
def test_the_parameters_of_known_models(config: dict[str, Any], parameters: int) -> None:
    assert shape_from_config(config).total == parameters


def test_a_value_head_takes_the_place_of_the_language_models() -> None:
    shape = shape_from_config(LLAMA)
    assert shape.value_head_params == shape.total - 128256 * 4096 + 4096
    assert replace(shape, tied=True).value_head_params == replace(shape, tied=True).total + 4096


def safetensors(path: Path, tensors: dict[str, list[int]]) -> None:
    """A file with the header that such tensors have, and no data."""
    entries = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in tensors.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def test_stored_weights_are_counted_and_go_before_the_formula(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "unheard-of", "vocab_size": 2}))
    assert read_shape(tmp_path).estimated
    safetensors(tmp_path / "model-1.safetensors", {"a": [100, 200], "b": [5]})
    safetensors(tmp_path / "model-2.safetensors", {"c": [7]})
    assert read_shape(tmp_path).total == 20_012
    assert not read_shape(tmp_path).estimated


def folder_with_weights(folder: Path, weight_map: Any, *names: str) -> Path:
    """A model's folder: 30,000 parameters in each file of ``names``, and an index unless it is None."""
    (folder / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 2}))
    for name in names:
        safetensors(folder / f"{name}.safetensors", {"a": [30_000]})
    if weight_map is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


FIRST, SECOND = "model-1.safetensors", "model-2.safetensors"


@pytest.mark.parametrize(
    ("weight_map", "names", "parameters"),
    [
        ({"a": FIRST, "b": SECOND, "c": SECOND}, ("model-1", "model-2", "consolidated"), 60_000),
        ({f"layer.{number:060}": FIRST for number in range(60_000)}, ("model-1", "consolidated"), 30_000),
        (None, ("model", "consolidated"), 30_000),
        (None, ("model-1", "model-2"), 60_000),
    ],
    ids=["an index", "an index of 6 MB", "one file", "no index"],
)
def test_a_second_copy_of_the_weights_is_not_counted(
    tmp_path: Path, weight_map: Any, names: tuple[str, ...], parameters: int
) -> None:
    """Repositories of Mistral have consolidated.safetensors too, which transformers and vLLM do not load."""
    assert read_shape(folder_with_weights(tmp_path, weight_map, *names)).total == parameters


@pytest.mark.parametrize("other", [SECOND, "..", "/etc/passwd", "../model-1.safetensors"])
def test_weights_that_are_not_all_there_are_computed(tmp_path: Path, other: str) -> None:
    """The index names a file that is not in the folder, whatever it is."""
    folder = folder_with_weights(tmp_path, {"a": FIRST, "b": other}, "model-1", "consolidated")
    assert read_shape(folder) == shape_from_config(LLAMA | {"vocab_size": 2})


@pytest.mark.parametrize("weight_map", [[FIRST], {"a": [FIRST]}, {"a": None}, "x"])
def test_an_index_that_names_no_files_is_an_error(tmp_path: Path, weight_map: Any) -> None:
    with pytest.raises(ShapeError, match=r"model.safetensors.index.json: weight_map is not an object"):
        read_shape(folder_with_weights(tmp_path, weight_map, "model-1"))


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("{", "not JSON"),
        (json.dumps(LLAMA | {"hidden_size": None}), "hidden_size is None"),
        (json.dumps({key: value for key, value in LLAMA.items() if key != "vocab_size"}), "vocab_size"),
    ],
)
def test_a_config_that_cannot_be_used_is_named(tmp_path: Path, content: str, error: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ShapeError, match=error) as raised:
        read_shape(file)
    assert str(file) in str(raised.value)


def test_a_folder_without_a_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="No such file"):
        read_shape(tmp_path)


def test_weights_that_are_only_a_pointer_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ShapeError, match="not a safetensors file"):
        read_shape(tmp_path)


TYPED = "layers:28,hidden:3584,intermediate:18944,heads:28,vocabulary:152064"


def test_typed_sizes_are_those_of_the_config() -> None:
    text = "layers:28,hidden:3584,intermediate:18944,heads:28,kv_heads:4,vocabulary:152064,qkv_bias:1"
    assert parse_shape(f"{text},max_length:32768") == shape_from_config(
        QWEN | {"max_position_embeddings": 32768}
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("7b", "expected NAME:NUMBER"),
        ("layers:x", "is not a number"),
        ("layers:-1", "must not be negative"),
        ("layers:2,hidden:64", "missing intermediate, heads"),
        ("layers:inf", "is not a number"),
        (f"{TYPED},kv_heads:29", "28 heads are not a multiple of 29 kv_heads"),
        (f"{TYPED},kv_heads:8", "28 heads are not a multiple of 8 kv_heads"),
        (f"{TYPED},active:8,experts:4", "8 active experts of 4"),
        (f"{TYPED},active:8", "8 active experts of 0"),
        (f"{TYPED},experts:4", "active is missing"),
        (f"{TYPED},tied:7", "tied is 0 or 1"),
        (f"{TYPED},cached_layers:29", "29 cached_layers of 28 layers"),
        (f"{TYPED},parameters:1", "1 parameters, fewer than the embedding"),
    ],
)
def test_typed_sizes_that_are_wrong_are_named(text: str, error: str) -> None:
    with pytest.raises(ShapeError, match=error):
        parse_shape(text)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_key_value_heads": 12}, "32 heads are not a multiple of 12 kv_heads"),
        ({"num_experts": 4, "num_experts_per_tok": 8}, "8 active experts of 4"),
        ({"model_type": 7}, "model_type is 7, not text"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\], not text"),
    ],
    ids=str,
)
def test_sizes_of_a_config_that_contradict_each_other_are_named(changes: dict[str, Any], error: str) -> None:
    """They were only of typed sizes, so that a run with such a config was planned."""
    with pytest.raises(ShapeError, match=f"^config.json: {error}"):
        shape_from_config(LLAMA | changes)


def test_fewer_stored_parameters_than_the_embedding_are_not_the_models() -> None:
    """Next to a config.json there may be an adapter, or one part of the weights."""
    assert shape_from_config(LLAMA, stored=1000) == shape_from_config(LLAMA)


def test_an_empty_scaling_and_no_type_are_those_of_an_unknown_model() -> None:
    """They ended `plan` as a defect, and as a type that is no text."""
    lengths = {"max_position_embeddings": 8192, "rope_scaling": {}}
    shape = shape_from_config(LLAMA | lengths | {"model_type": None})
    assert (shape.max_length, shape.estimated) == (8192, True)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 0),
        ({"max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": None}, 0),
        ({"max_position_embeddings": 8192, "n_positions": 1024}, 1024),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
        ({"max_position_embeddings": 8192, "rope_scaling": {"type": "linear", "factor": 2}}, 16384),
        ({"max_position_embeddings": 40960, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 40960, "rope_parameters": YARN}, 131072),
        ({"max_position_embeddings": 40960, "rope_parameters": {"a": YARN, "b": {"factor": 2}}}, 131072),
        ({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 8192),
        ({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "default"}}, 8192),
        ({"max_position_embeddings": 8192, "rope_scaling": {"type": "dynamic", "factor": "2"}}, 0),
        ({"max_position_embeddings": 8192, "rope_scaling": ["x"]}, 8192),
        ({"model_type": "gemma3", "max_position_embeddings": 8192, "rope_scaling": {"factor": 8}}, 8192),
        ({"max_position_embeddings": "x"}, 0),
    ],
    ids=str,
)
def test_the_longest_sequence_is_that_of_vllm(changes: dict[str, Any], length: int) -> None:
    assert shape_from_config(LLAMA | changes).max_length == length


@given(PARAMETERS, ZEROS)
def test_more_ranks_never_need_more(parameters: int, zero: Zero) -> None:
    few, many = model_states(parameters, zero), model_states(parameters, replace(zero, ranks=zero.ranks * 2))
    assert many.held <= few.held
    assert many.host <= few.host


@given(PARAMETERS, ZEROS)
def test_the_optimiser_is_on_the_gpu_or_on_the_host_and_nothing_is_lost(parameters: int, zero: Zero) -> None:
    on_gpu = model_states(parameters, replace(zero, offload=False))
    on_host = model_states(parameters, replace(zero, offload=True))
    assert on_gpu.host == 0
    assert on_host.held <= on_gpu.held
    if not (zero.stage == 1 and zero.fp32_gradients):  # DeepSpeed then has another optimiser on the GPU
        assert on_host.held + on_host.host >= on_gpu.held


@given(PARAMETERS, st.integers(2, 64))
def test_each_stage_holds_no_more_than_the_one_before(parameters: int, ranks: int) -> None:
    held = [model_states(parameters, Zero(stage, ranks)).held for stage in (0, 1, 2, 3)]
    assert held == sorted(held, reverse=True)


def test_gradients_in_32_bits_of_stage_1_are_whole_and_next_to_those_in_16() -> None:
    """DeepSpeed's BF16_Optimizer allocates them for the whole model, and its step uses them in place."""
    zero = Zero(1, 8, fp32_gradients=True)
    found = model_states(8_000_000_000, zero)
    assert (found.gradients, found.step) == (6 * 8_000_000_000, 0)
    in_16_bits = model_states(8_000_000_000, replace(zero, fp32_gradients=False))
    assert (in_16_bits.gradients, in_16_bits.step) == (2 * 8_000_000_000, 4 * 1_000_000_000)
    on_host = model_states(8_000_000_000, replace(zero, offload=True))
    assert on_host.gradients == 2 * 8_000_000_000, "with the optimiser on the host DeepSpeed has another one"


@given(PARAMETERS, ZEROS)
def test_a_model_that_is_not_trained_has_weights_alone(parameters: int, zero: Zero) -> None:
    found = model_states(parameters, zero, trained=0)
    assert found.gradients == found.optimizer == found.step == 0
    assert found.weights * zero.ranks >= BYTES_16BIT * parameters


@given(PARAMETERS, ZEROS)
def test_offloaded_weights_are_on_the_host(parameters: int, zero: Zero) -> None:
    found = model_states(parameters, replace(zero, stage=3, offload_weights=True), trained=0)
    assert found.weights == 0
    assert found.host * zero.ranks >= BYTES_16BIT * parameters


@given(SHAPES, PASSES)
def test_recomputing_saves_memory_and_more_tokens_need_more(shape: Shape, work: Pass) -> None:
    assume(shape.layers > 1)
    stored, recomputed = replace(work, checkpointing=False), replace(work, checkpointing=True)
    assert saved_activations(shape, recomputed) < saved_activations(shape, stored)
    assert training_peak(shape, recomputed) <= training_peak(shape, stored)
    longer = replace(work, length=work.length + 1)
    assert training_peak(shape, longer) >= training_peak(shape, work)
    assert forward_peak(shape, longer) >= forward_peak(shape, work)


def test_log_probabilities_of_many_tokens_are_computed_in_parts() -> None:
    """Peaks in units of the 32-bit logits, as a GPU and a CPU have them."""
    shape = replace(shape_from_config(LLAMA), layers=1)

    def peaks(tokens: int) -> tuple[float, float]:
        work = Pass(sequences=1, length=tokens)
        logits = 4 * tokens * shape.vocabulary
        above = training_peak(shape, work) - saved_activations(shape, work)
        return above / logits, forward_peak(shape, work) / logits

    assert peaks(1024) == (3.0, 2.0)
    assert peaks(4096) == (2.25, 1.5)


@given(SHAPES, PASSES)
def test_a_peak_is_at_least_what_is_saved(shape: Shape, work: Pass) -> None:
    assert training_peak(shape, work) >= saved_activations(shape, work)


@given(SHAPES, PASSES)
def test_only_eager_attention_grows_with_the_square_of_the_length(shape: Shape, work: Pass) -> None:
    work = replace(work, checkpointing=False, length=1024, split=1)
    twice = replace(work, length=2048)
    if work.attention == "eager":
        assert saved_activations(shape, twice) > 2 * saved_activations(shape, work)
    else:
        assert saved_activations(shape, twice) == 2 * saved_activations(shape, work)


@given(SHAPES, st.sampled_from([1, 2, 4, 8]), st.floats(0.1, 1), st.integers(1, 131072), st.integers(1, 192))
def test_an_engines_memory_is_all_accounted_for(
    shape: Shape, size: int, utilization: float, length: int, gib: int
) -> None:
    found = kv_cache(shape, EngineSettings(size, utilization, length), gib * GIB)
    assert found.cache + found.weights + found.working <= max(found.budget, found.weights + found.working)
    assert found.tokens * token_bytes(shape, size) <= found.cache
    assert found.fits == (found.tokens >= length)
    more = kv_cache(shape, EngineSettings(size, min(1.0, utilization + 0.05), length), gib * GIB)
    assert more.tokens >= found.tokens


@given(SHAPES, st.sampled_from([2, 4, 8]))
def test_an_engine_of_more_gpus_needs_less_of_each(shape: Shape, size: int) -> None:
    assert engine_weights(shape, size) < engine_weights(shape, size // 2)
    assert token_bytes(shape, size) <= token_bytes(shape, size // 2)
    assert token_bytes(shape, size) * size >= token_bytes(shape, 1)


def test_grouped_heads_make_the_cache_small() -> None:
    """Llama 3 8B: 128 KiB for a token in 16 bits, a quarter of what 32 heads would need."""
    assert token_bytes(shape_from_config(LLAMA), 1) == 128 * 1024
    assert token_bytes(shape_from_config(LLAMA | {"num_key_value_heads": 32}), 1) == 512 * 1024
    assert token_bytes(shape_from_config(LLAMA), 16) == 128 * 1024 // 8


def test_bytes_of_llama_70b_computed_by_hand() -> None:
    """80 layers of 855,654,400 parameters, two embeddings of 1,050,673,152 and a norm of 8,192."""
    shape = shape_from_config(LLAMA_70B)
    assert shape.total == 70_553_706_496
    assert engine_weights(shape, 1) == 141_107_412_992
    assert engine_weights(shape, 8) == 17_640_734_720, "1,318,912 parameters of norms are on every GPU"
    assert token_bytes(shape, 8) == 40_960, "keys and values of 128 numbers in 80 layers"
    assert sync_memory(shape, 32_000_000) == 2_101_346_304 + 64_000_000, "the embedding and two buckets"
    states = model_states(shape.total, Zero(3, 64))
    assert states.weights == states.gradients == 2_204_803_328
    assert states.optimizer == 13_228_819_968, "12 bytes for each of 1,102,401,664 parameters"


def test_bytes_of_the_experts_of_qwen3_235b_computed_by_hand() -> None:
    """128 experts of 2 x 1536 x 4096 parameters in one tensor; the embedding has 622,329,856."""
    shape = shape_from_config(QWEN3_235B)
    assert shape.total == 235_093_634_560
    assert sync_memory(shape, 32_000_000) == 3_221_225_472 + 64_000_000


def test_bytes_of_a_sync_of_qwen2_half_a_billion_computed_by_hand() -> None:
    shape = shape_from_config(SMALL_QWEN)
    assert sync_memory(shape, 32_000_000) == 272_269_312 + 64_000_000, "151,936 x 896 parameters"
    assert sync_memory(shape, 300_000_000) == 600_000_000, "nothing is larger than a bucket"


def test_bytes_of_a_reload_computed_by_hand() -> None:
    """Of the largest layer: what has arrived and what is loaded, and of experts what is rearranged."""
    bucket = 32_000_000
    llama, experts = shape_from_config(LLAMA_70B), shape_from_config(QWEN3_235B)
    assert reload_memory(llama, 8, bucket) == bucket + 2 * 2 * 1_050_673_152 // 8, "its embedding"
    assert reload_memory(experts, 8, bucket) == bucket + 3 * 2 * 128 * 3 * 1536 * 4096 // 8, "its experts"
    unpadded = replace(llama, vocabulary=32_000)
    assert reload_memory(unpadded, 8, bucket) == bucket + 2 * 2 * 2 * 28_672 * 8_192 // 8, "gate and up"
    padded = replace(experts, vocabulary=experts.vocabulary - 1)
    embedding = 2 * (151_935 * 4_096 + 7) // 8
    difference = reload_memory(padded, 8, bucket) - reload_memory(experts, 8, bucket)
    assert abs(difference - 2 * embedding) < 64, "both embeddings are incomplete until the end"


def test_bytes_saved_by_llama_8b_computed_by_hand() -> None:
    """1024 tokens, checkpoints of 32 layers: 33 hidden states, the last norm, and logits in 32 bits."""
    work = Pass(sequences=1, length=1024, checkpointing=True)
    expected = 33 * 8_388_608 + 1024 * (6 * 4096 + 4) + 525_336_576
    assert saved_activations(shape_from_config(LLAMA), work) == expected


def test_bytes_saved_by_experts_computed_by_hand() -> None:
    """A token has 8 of them, each with an input and an output of 4096, and 4 tensors of 1536."""
    work = Pass(sequences=1, length=1024)
    experts = shape_from_config(QWEN3_235B)
    dense = replace(experts, experts=0, active=0, intermediate=1)
    more = saved_activations(experts, work) - saved_activations(dense, work)
    assert more == 94 * 2 * 1024 * (8 * (4 * 1536 + 2 * 4096) - 4)


def test_a_pass_without_gradients_has_the_outputs_of_experts_in_three_orders() -> None:
    """And their inputs; scaled by their weights, and sorted as the tokens."""
    work = Pass(sequences=1, length=1024, value_head=True)
    assert forward_peak(shape_from_config(QWEN3_235B), work) == 2 * 1024 * (8 * 4 * 4096 + 4 * 4096)


def test_stage_3_gathers_the_experts_of_a_layer_together() -> None:
    """Of Qwen3-235B-A22B: 2,415,919,104 parameters, more than DeepSpeed's limits of either kind."""
    shape, zero = shape_from_config(QWEN3_235B), Zero(3, 64)
    block = 128 * 3 * 1536 * 4096
    assert shape.expert_block == block
    parted, whole = (model_states(shape.total, zero, None, size) for size in (0, block))
    assert (parted.buffers, whole.buffers) == (3_000_000_000, 1_000_000_000 + 4 * block)
    assert replace(whole, buffers=0) == replace(parted, buffers=0)
    untrained = model_states(shape.total, zero, 0, block)
    assert untrained.buffers == 2 * block
    adapters = model_states(shape.total, zero, 10_000_000, block)
    assert adapters.buffers == 1_000_000_000 + 2 * block, "experts have no gradients"
    assert model_states(shape.total, replace(zero, stage=2), None, block).buffers == 1_000_000_000
    small = model_states(shape.total, zero, None, 400_000_000)
    assert small == parted
