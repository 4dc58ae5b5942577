"""torch and Ray, imported when one of their names is first used. Every package may import it.

Each takes seconds to import, and both are absent outside the images.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ray
    import torch
else:

    class Lazy:
        """The module ``name``; it can be pickled, with functions that use it."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(import_module(self._name), attribute)

        def __reduce__(self) -> tuple[type, tuple[str]]:
            return Lazy, (self._name,)

    ray, torch = Lazy("ray"), Lazy("torch")
