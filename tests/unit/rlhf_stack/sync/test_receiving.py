"""An engine worker's side of a sync whose source is lost; syncs between processes are in tests/cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rlhf_stack.sync import receiving
from rlhf_stack.sync.errors import SyncError


class Group:
    """A sync group that keeps the error with which its sync ends; its source may be lost before it begins."""

    def __init__(self, lost: str = "") -> None:
        self.lost = lost
        self.error: BaseException | None = None

    @contextmanager
    def syncing(self) -> Iterator[None]:
        if self.lost:
            raise SyncError(self.lost)
        try:
            yield
        except BaseException as error:
            self.error = error
            raise


def test_a_source_that_is_lost_between_syncs_ends_the_sync_of_all_others() -> None:
    """Each publishes the error with which its sync ends: the other sources learn the cause from it."""
    groups: list[Any] = [Group(), Group("rank 0 on 10.0.0.2 does not answer"), Group(), Group("as lost")]
    with pytest.raises(SyncError, match="rank 0 on 10") as ended:
        receiving.receive(groups, [], 1, "cpu", list, None)
    assert [each.error for each in groups] == [ended.value, None, ended.value, None]
