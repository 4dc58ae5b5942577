"""Strided views of parameters, simplified and cut to a range."""

import itertools

import hypothesis.strategies as st
from hypothesis import given
from rlhf_stack.sync.weight_layout import View

SIDES = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12)), max_size=4)


def elements(view: View) -> list[int]:
    steps = [
        [index * stride for index in range(size)]
        for size, stride in zip(view.sizes, view.strides, strict=True)
    ]
    return [view.offset + sum(each) for each in itertools.product(*steps)]


@given(st.integers(0, 9), SIDES, st.integers(-3, 90), st.integers(0, 90))
def test_a_range_of_a_view_has_its_elements_there_and_no_others(
    offset: int, sides: list[tuple[int, int]], begin: int, length: int
) -> None:
    view = View(offset, tuple(size for size, _ in sides), tuple(stride for _, stride in sides))
    simple = view.simplified()
    assert set(elements(simple)) == set(elements(view))
    parts = [element for part in simple.within(begin, begin + length) for element in elements(part)]
    assert sorted(parts) == sorted(each for each in elements(simple) if begin <= each < begin + length)


def test_adjacent_rows_are_one_side() -> None:
    assert View(80, (3, 1, 4, 5), (20, 7, 5, 1)).simplified() == View(80, (60,), (1,))
    assert View(0, (5, 4), (1, 8)).simplified() == View(0, (4, 5), (8, 1))
