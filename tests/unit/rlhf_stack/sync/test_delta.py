"""Changed elements are found by their bits, and applied exactly."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_stack.sync import delta

WIDTHS = (1, 2, 4, 8)


def random_bytes(size: int, seed: int) -> "delta.Bytes":
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def sent(old: "delta.Bytes", new: "delta.Bytes", width: int) -> "delta.Bytes":
    """Return the message for a bucket of one part; both sides end with the new bytes."""
    trainer, worker = old.copy(), old.copy()
    message = delta.changes(trainer, [(0, new)], width)
    delta.apply(message, worker)
    assert trainer.tobytes() == worker.tobytes() == new.tobytes()
    return message


@given(
    width=st.sampled_from(WIDTHS),
    count=st.integers(0, 2000),
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0, 0.001, 0.02, 0.3, 1]),
)
def test_random_bytes_arrive_exactly(width: int, count: int, seed: int, share: float) -> None:
    old = random_bytes(count * width, seed)
    new = old.copy()
    chosen = np.random.default_rng(seed).random(count) < share
    new.reshape(count, width)[chosen] = random_bytes(count * width, seed + 1).reshape(count, width)[chosen]
    message = sent(old, new, width)
    assert len(message) <= delta.HEAD.size + len(new)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("at", [0, 254, 255, 256, 509, 510, 511, 65535, 600_000, -1])
def test_one_bit_is_a_message_of_one_element(width: int, at: int) -> None:
    old = random_bytes(width << 20, 0)
    new = old.copy()
    new.reshape(-1, width)[at, -1] ^= 0x80
    gap = at % (1 << 20)
    assert len(sent(old, new, width)) == delta.HEAD.size + width + gap // delta.SKIP + 1


def test_the_sign_of_zero_and_the_payload_of_nan_are_changes() -> None:
    old = np.array([0.0, np.nan, np.nan, 1.0], np.float32)
    new = old.copy().view(np.uint32)
    new[0], new[1] = 0x80000000, new[1] ^ 1
    message = sent(old.view(np.uint8), new.view(np.uint8), 4)
    assert delta.HEAD.unpack_from(message.data) == (0, 4, 2)


def test_a_bucket_that_changes_everywhere_is_sent_whole() -> None:
    old, new = random_bytes(3000, 0), random_bytes(3000, 1)
    assert len(sent(old, new, 2)) == delta.HEAD.size + 3000


def test_parts_have_their_place_in_the_bucket() -> None:
    old = random_bytes(4096, 0)
    new = old.copy()
    new[16:18] ^= 1
    new[2048 + 32] ^= 1
    trainer, worker = old.copy(), old.copy()
    message = delta.changes(trainer, [(16, new[16:100]), (2048, new[2048:2096])], 2)
    delta.apply(message, worker)
    assert trainer.tobytes() == worker.tobytes() == new.tobytes()
    assert delta.HEAD.unpack_from(message.data)[2] == 2


def test_messages_announce_each_other() -> None:
    first, second = delta.head(), np.zeros(77, np.uint8)
    assert delta.next_size(first) == 0
    delta.announce(first, second)
    assert (delta.next_size(first), len(first)) == (77, delta.HEAD.size)
