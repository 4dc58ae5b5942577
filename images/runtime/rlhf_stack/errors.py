"""The error type for mistakes that the user can correct."""


class UserError(Exception):
    """One line with the mistake and its remedy; the command prints it without a traceback."""
