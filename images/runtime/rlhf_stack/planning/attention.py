"""Models that would train with other attention than they were made with, before they are loaded.

`compat.varlen_attention.check_model` refuses what is loaded.
"""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from rlhf_stack.compat.varlen_attention import FLASH_ATTENTION
from rlhf_stack.config import image
from rlhf_stack.memory import Shape
from rlhf_stack.openrlhf.run_spec import Run


def unserved(shape: Shape) -> str:
    """The feature of a model that ``flash_attention_2`` does not compute here; "" if there is none.

    Outside of an image it is unknown what the image of the run has.
    """
    return shape.attention if image.about().cell and find_spec("flash_attn") is None else ""


def obstacles(run: Run, shapes: Mapping[str, Shape]) -> Iterator[str]:
    """Why the trainer cannot compute the attention of a model of ``run``, with the remedy."""
    packing = "--packing_samples" if run.flat else "--ds.packing_samples and --train.dynamic_batch_enable"
    for model in dict.fromkeys(role.model for role in run.roles):
        if run.packed and shapes[model].recurrent:
            yield (
                f"{model} has layers that pass a state from token to token, and samples that are packed into "
                f"one row would share it: leave out {packing}"
            )
        if (run.packed or run.attention == FLASH_ATTENTION) and (feature := unserved(shapes[model])):
            eager = "leave out --flash_attn" if run.flat else "give --ds.attn_implementation eager"
            yield (
                f"{model} has {feature}, which {FLASH_ATTENTION} does not compute here: {eager}, and leave "
                f"out {packing}"
            )
