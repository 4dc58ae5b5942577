"""What the rung ``memory`` measures on a CPU, from made-up events of torch's profiler."""

from dataclasses import dataclass

import pytest
from rlhf_stack.certify import memory_peaks


@dataclass
class Event:
    """An event of torch 2.13's profiler."""

    label: str
    start: int
    duration: int = 0
    bytes: int = 0

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration

    def nbytes(self) -> int:
        return self.bytes


class OldEvent(Event):
    """One of torch 2.3's, which counts microseconds."""

    start_us, duration_us = Event.start_ns, Event.duration_ns

    def __getattribute__(self, name: str) -> object:
        if name in ("start_ns", "duration_ns"):
            raise AttributeError(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("kind", [Event, OldEvent])
def test_the_temporary_copy_of_a_matrix_product_is_not_counted(kind: type[Event]) -> None:
    events = [
        kind("aten::mul", 1, 10),
        kind("[memory]", 2, bytes=100),
        kind("aten::mm", 20, 10),
        kind("[memory]", 21, bytes=50),  # the result
        kind("aten::resolve_conj", 22, 1),
        kind("[memory]", 23, bytes=1000),
        kind("[memory]", 29, bytes=-1000),
        kind("[memory]", 31, bytes=7),
        kind("[memory]", 32, bytes=-7),
        kind("aten::mul", 40, 10),
        kind("[memory]", 41, bytes=-100),
    ]
    found = [change for change in memory_peaks.changes(events[::-1]) if change]
    assert found == [100, 50, 7, -7, -100]
