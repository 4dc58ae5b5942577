"""Division of parameters into buckets; sending them is in tests/cluster."""

import itertools
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import given
from rlhf_stack.sync.buckets import (
    ALIGNMENT,
    LARGE,
    ParameterSpec,
    chain_order,
    linked_buckets,
    plan_buckets,
    total_bytes,
)

SIZES = st.lists(st.one_of(st.integers(0, 70), st.integers(LARGE - 2, LARGE + 2)), max_size=40)


LIMITS = st.integers(LARGE // 3, 3 * LARGE)


def specs(sizes: list[int]) -> list[ParameterSpec]:
    return [ParameterSpec(f"w{index}", "uint8", (size,), size) for index, size in enumerate(sizes)]


@given(SIZES, LIMITS)
def test_every_byte_is_in_one_bucket_in_order_and_no_bucket_exceeds_the_limit(
    sizes: list[int], limit: int
) -> None:
    buckets = plan_buckets(specs(sizes), limit)
    spans = [span for bucket in buckets for span in bucket.spans]
    for index, size in enumerate(sizes):
        own = [span for span in spans if span.index == index]
        assert [span.start for span in own] == [sum(one.size for one in own[:n]) for n in range(len(own))]
        assert sum(span.size for span in own) == size
        assert len(own) == 1 or size > limit - ALIGNMENT, "only a large parameter is split"
        assert all(span.start % ALIGNMENT == 0 for span in own)
    assert [span.index for span in spans] == sorted(span.index for span in spans)
    for bucket in buckets:
        assert bucket.size <= max(limit, ALIGNMENT)
        assert bucket.size == bucket.spans[-1].end
        assert all(span.begin % ALIGNMENT == 0 for span in bucket.spans), "a view of any dtype is possible"
        ends = [0] + [span.end for span in bucket.spans]
        assert all(span.begin >= end for span, end in zip(bucket.spans, ends, strict=False))


@given(SIZES, LIMITS)
def test_buckets_of_a_parameter_are_linked_and_others_are_not(sizes: list[int], limit: int) -> None:
    buckets = plan_buckets(specs(sizes), limit)
    groups = list(linked_buckets(buckets, specs(sizes)))
    assert [one for group in groups for one in group] == list(enumerate(buckets))
    indices = [{span.index for _, bucket in group for span in bucket.spans} for group in groups]
    assert sum(map(len, indices)) == len(sizes), "each parameter is in one group"
    for group, members in zip(groups, indices, strict=True):
        others = sum(sizes[index] for index in members if sizes[index] <= limit - ALIGNMENT)
        assert others <= limit, "a group has at most one large parameter and a bucket of small ones"
        assert len(group) == 1 or sum(sizes[index] > limit - ALIGNMENT for index in members) <= 1


@given(SIZES, st.lists(st.integers(1, 6), min_size=1), LIMITS)
def test_parts_of_a_fused_parameter_are_linked_and_no_other_is_gathered_with_them(
    sizes: list[int], parts: list[int], limit: int
) -> None:
    """Parameter f has ``parts[f]`` parts; with one part it is not fused."""
    owners = [
        f for f, count in zip(range(len(sizes)), itertools.cycle(parts), strict=False) for _ in range(count)
    ]
    described = [
        replace(spec, fused=f"f{owner}" if owners.count(owner) > 1 else "")
        for spec, owner in zip(specs(sizes), owners, strict=False)
    ]
    room = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    groups = list(linked_buckets(plan_buckets(described, limit), described))
    held = [{owners[span.index] for _, bucket in group for span in bucket.spans} for group in groups]
    assert sum(map(len, held)) == len({*owners[: len(sizes)]}), "each is gathered once"
    for group, members in zip(groups, held, strict=True):
        whole = {
            one: sum(size for size, owner in zip(room, owners, strict=False) if owner == one)
            for one in members
        }
        assert sum(size for size in whole.values() if size <= limit - ALIGNMENT) <= limit + ALIGNMENT
        assert len(group) == 1 or sum(size > limit - 2 * ALIGNMENT for size in whole.values()) <= 1


@given(SIZES, LIMITS)
def test_buckets_are_as_few_as_their_order_allows(sizes: list[int], limit: int) -> None:
    buckets = plan_buckets(specs(sizes), limit)
    for bucket, following in itertools.pairwise(buckets):
        first = following.spans[0]
        begin = -(-bucket.size // ALIGNMENT) * ALIGNMENT
        assert begin + sizes[first.index] - first.start > max(ALIGNMENT, limit // ALIGNMENT * ALIGNMENT)


@given(SIZES)
def test_parts_contain_each_span_once_and_a_large_parameter_alone(sizes: list[int]) -> None:
    for bucket in plan_buckets(specs(sizes), 3 * LARGE):
        parts = list(bucket.parts())
        assert [span for part in parts for span in part] == list(bucket.spans)
        for part in parts:
            assert len(part) == 1 or all(span.end - span.begin < LARGE for span in part)
        small = [part[0].end - part[0].begin < LARGE for part in parts]
        assert not any(one and two for one, two in itertools.pairwise(small)), "runs are whole"


def test_a_bucket_is_named_by_its_parameters() -> None:
    buckets = plan_buckets(specs([40, 8, 100]), 64)
    assert [bucket.title for bucket in buckets] == [
        "bucket 1 of 3 (w0 … w1, 48 bytes)",
        "bucket 2 of 3 (w2, 64 bytes)",
        "bucket 3 of 3 (w2, 36 bytes)",
    ]
    assert total_bytes(specs([40, 8, 100])) == 148


def test_the_chain_enters_each_node_once() -> None:
    assert chain_order(["a", "b", "a", "b", "c", "a"]) == [0, 2, 5, 1, 3, 4]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=20))
def test_the_chain_begins_with_the_trainer_and_has_every_rank(nodes: list[str]) -> None:
    order = chain_order(nodes)
    assert order[0] == 0
    assert sorted(order) == list(range(len(nodes)))
    crossings = sum(nodes[one] != nodes[two] for one, two in itertools.pairwise(order))
    assert crossings == len(set(nodes)) - 1
