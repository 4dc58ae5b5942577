"""The kernels that are executed: consistent inputs, and results that a wrong kernel does not match."""

import math
import struct

import pytest

from scripts.hip import cases
from scripts.hip.cases import BFLOAT, FLOAT, HALF, INT8, INT16, UINT8, Case, Type
from scripts.hip.inspection import DEEPSPEED_0_15, DEEPSPEED_0_19, VLLM_0_4

ALL = list(cases.cases())


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_results_have_the_size_of_their_buffer_and_differ_from_what_is_in_it(case: Case) -> None:
    work = case.make()
    for index, (kind, wanted) in work.expected.items():
        assert len(wanted) * kind.size == len(work.buffers[index])
        assert cases.worst_error((kind, wanted), work.buffers[index]) > case.type.tolerance
        assert cases.worst_error((kind, wanted), kind.encode(wanted)) <= case.type.tolerance


def test_exactly_these_kernels_types_and_head_sizes_are_executed() -> None:
    """The types are those for which vLLM's and DeepSpeed's code dispatches, without the fp8 cache."""
    floats = ("float32", "float16", "bfloat16")
    plain = {
        "silu_and_mul": floats,
        "gelu_and_mul": floats,
        "gelu_tanh_and_mul": floats,
        "gelu_new": floats,
        "gelu_fast": floats,
        "fused_add_rms_norm": floats,
        "rms_norm": floats,
        "rotary_embedding": floats,
        "reshape_and_cache": floats,
        "copy_blocks": (*floats, "uint8"),
        "fused_adam": (*floats, "float64"),
        "moe_align_block_size": ("uint8", "int8", "int16", "int32", "int64"),
    }
    wanted: list[tuple[str, str, int | None]]
    wanted = [(kernel, kind, None) for kernel, kinds in plain.items() for kind in kinds]
    for kernel in ("paged_attention_v1", "paged_attention_v2"):
        wanted += [(kernel, kind, size) for kind in floats for size in (64, 80, 96, 112, 128, 256)]
    found = [(case.kernel, case.type.name, case.head_size) for case in ALL if case.package != DEEPSPEED_0_19]
    assert sorted(found, key=str) == sorted(wanted, key=str)


def test_only_fused_adam_is_not_of_vllm() -> None:
    assert {case.kernel for case in ALL if case.package != VLLM_0_4} == {"fused_adam"}


def test_both_releases_of_deepspeed_have_the_same_cases_with_sizes_of_their_own_type() -> None:
    older, newer = ([case for case in ALL if case.package == one] for one in (DEEPSPEED_0_15, DEEPSPEED_0_19))
    assert [case.id for case in older] == [case.id for case in newer]
    for old, new in zip(older, newer, strict=True):
        short, long = (case.make().launches[0].values[2]["bytes"] for case in (old, new))
        assert len(long) - len(short) == 2 * 36 * 4  # as hex


# As g++ mangles the instantiations of vLLM 0.4.2's templates.
INSTANTIATED = (
    *(f"_ZN4vllm27moe_align_block_size_kernelI{kind}EEvPT_PiS3_S3_iim" for kind in "hasil"),
    *(f"_ZN4vllm18copy_blocks_kernelI{kind}EEvPlS1_PKli" for kind in "fh"),
    *(f"_ZN4vllm18copy_blocks_kernelIN3c10{kind}EEEvPlS3_PKli" for kind in ("4Half", "8BFloat16")),
)


def test_the_approximation_by_tanh_is_near_the_function() -> None:
    for number in range(-40, 41):
        assert cases.gelu_by_tanh(number / 8) == pytest.approx(cases.gelu(number / 8), abs=5e-4)


@pytest.mark.parametrize(
    "case",
    [case for case in ALL if case.kernel in ("moe_align_block_size", "copy_blocks")],
    ids=lambda c: c.id,
)
def test_each_type_of_a_dispatched_kernel_has_an_instantiation_of_its_own(case: Case) -> None:
    (launch,) = case.make().launches
    cases.find(INSTANTIATED, launch.kernel)


@pytest.mark.parametrize(
    ("kind", "value", "near"), [(FLOAT, 0.1, 1e-8), (HALF, 0.1, 1e-4), (BFLOAT, 0.1, 1e-3), (BFLOAT, 1.0, 0)]
)
def test_values_are_rounded_to_the_type(kind: Type, value: float, near: float) -> None:
    (found,) = kind.decode(kind.encode([value]))
    assert abs(found - value) <= near


@pytest.mark.parametrize(
    ("kind", "values"), [(UINT8, [0, 255]), (INT8, [-128, 127]), (INT16, [-32768, 32767])]
)
def test_small_integers_keep_their_values(kind: Type, values: list[int]) -> None:
    content = kind.encode(values)
    assert (len(content), kind.decode(content)) == (kind.size * len(values), values)


def test_bfloat16_rounds_to_the_nearest_and_ties_to_even() -> None:
    down, up = (struct.unpack("<f", struct.pack("<I", bits))[0] for bits in (0x3F808000, 0x3F818000))
    assert struct.unpack("<2H", BFLOAT.encode([down, up])) == (0x3F80, 0x3F82)


def test_a_result_that_is_not_a_number_is_infinitely_wrong() -> None:
    assert cases.worst_error((FLOAT, [1.0, 2.0]), FLOAT.encode([1.0, math.nan])) == math.inf
    assert cases.worst_error((FLOAT, [1.0, 200.0]), FLOAT.encode([1.5, 200.0])) == 0.5


def test_a_kernel_is_found_by_one_name_alone() -> None:
    names = ["_ZN4vllm15rms_norm_kernelIfEEvPT_", "_ZN4vllm25fused_add_rms_norm_kernelIfEEvPT_"]
    assert cases.find(names, "15rms_norm_kernelIfE") == names[0]
    for pattern in ("rms_norm_kernelIf", "rotary"):
        with pytest.raises(LookupError, match="kernels are called"):
            cases.find(names, pattern)
