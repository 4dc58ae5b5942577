"""The kernels that are executed: consistent inputs, and results that a wrong kernel does not match."""

import math
import struct

import pytest

from scripts.hip import cases
from scripts.hip.cases import BFLOAT, FLOAT, HALF, INT64, Case, Type

ALL = list(cases.cases())


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_results_have_the_size_of_their_buffer_and_differ_from_what_is_in_it(case: Case) -> None:
    work = case.make()
    for index, (kind, wanted) in work.expected.items():
        assert len(wanted) * kind.size == len(work.buffers[index])
    assert (
        max(cases.worst_error(work.expected[i], work.buffers[i]) for i in work.expected) > case.type.tolerance
    )


def test_the_issue_s_operators_are_covered_for_every_type() -> None:
    by_kernel = {case.kernel: {other.type for other in ALL if other.kernel == case.kernel} for case in ALL}
    assert {FLOAT, HALF, BFLOAT} <= by_kernel["silu_and_mul"] & by_kernel["rms_norm"] & by_kernel[
        "fused_adam"
    ]
    assert INT64 in by_kernel["moe_align_block_size"]
    sizes = {case.head_size for case in ALL if case.kernel == "paged_attention_v2" and case.type == BFLOAT}
    assert sizes == set(cases.HEAD_SIZES)


@pytest.mark.parametrize(
    ("kind", "value", "near"), [(FLOAT, 0.1, 1e-8), (HALF, 0.1, 1e-4), (BFLOAT, 0.1, 1e-3), (BFLOAT, 1.0, 0)]
)
def test_values_are_rounded_to_the_type(kind: Type, value: float, near: float) -> None:
    (found,) = kind.decode(kind.encode([value]))
    assert abs(found - value) <= near


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
