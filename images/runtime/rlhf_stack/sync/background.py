"""An action in a thread, so that waiting for it has a time limit even if the action never returns."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    """Runs ``action`` in a daemon thread, which does not keep the process alive."""

    def __init__(self, action: Callable[[], Result]) -> None:
        self._results: list[Result] = []
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(action,), daemon=True)
        self._thread.start()

    def done(self, seconds: float) -> bool:
        """Wait at most ``seconds`` and return whether the action has returned or raised."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> Result:
        """Wait for the action to end; return its result or raise its error."""
        self._thread.join()
        if self._errors:
            raise self._errors[0]
        return self._results[0]

    def _run(self, action: Callable[[], Result]) -> None:
        try:
            self._results.append(action())
        except BaseException as error:  # raised in `result`
            self._errors.append(error)
