"""Errors of a weight sync."""


class SyncError(RuntimeError):
    """A weight sync is impossible or did not finish in time."""


class SyncMismatch(RuntimeError):
    """An engine's weights differ from the trainer's after a sync."""
