"""What is raised when weights do not reach the engines."""


class SyncError(RuntimeError):
    """A weight sync that cannot be done or did not finish in time."""
