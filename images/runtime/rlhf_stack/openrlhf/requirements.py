"""Packages that a run needs and that not every image has."""

from importlib.util import find_spec

from rlhf_stack.errors import UserError
from rlhf_stack.openrlhf.run_spec import Run

RING_ATTENTION = ("flash_attn", "ring_flash_attn")


def refuse_missing_packages(run: Run) -> None:
    """Raise `UserError` if a feature of ``run`` needs a package that is not installed."""
    missing = [name for name in RING_ATTENTION if find_spec(name) is None] if run.ring > 1 else []
    if missing:
        flag = "--ring_attn_size" if run.flat else "--ds.ring_attn_size"
        raise UserError(
            f"{flag} {run.ring} needs {' and '.join(missing)}, not installed here: "
            "leave the flag out, or add the packages to a derived image"
        )
