"""The error that reports a user's mistake or a missing requirement."""


class UserError(Exception):
    """One line that states the problem and the remedy; the command prints it without a traceback."""
