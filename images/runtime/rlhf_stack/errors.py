"""The error type for mistakes that the user can correct."""


class UserError(Exception):
    """One line with the mistake and its remedy; the command prints it without a traceback.

    ``code`` is the exit code of the command, None for that of wrong usage.
    """

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code
