"""A mistake or a missing thing that the user can mend."""


class UserError(Exception):
    """What is wrong and what to do about it, in one line; the command shows it without a traceback."""
