"""What a sync must have sent to an engine."""

import pytest
from rlhf_stack.sync.engine_parameters import require_head
from rlhf_stack.sync.errors import SyncError

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_an_output_layer_that_keeps_its_values_ends_the_sync() -> None:
    """vLLM has one of its own for a tied model whose checkpoint has another one; rollouts would be of it."""
    with pytest.raises(SyncError, match=r"the engine has language_model\.lm_head\.weight of its own"):
        require_head({f"language_model.{EMBEDDINGS}"}, {f"language_model.{HEAD}", "visual.patch"})


@pytest.mark.parametrize(
    ("sent", "never_sent"),
    [
        ({EMBEDDINGS, HEAD}, {"router.bias"}),
        ({"model.norm.weight"}, {EMBEDDINGS, HEAD}),
        ({EMBEDDINGS}, set()),
    ],
    ids=["both are sent", "neither is sent", "one tensor serves both"],
)
def test_others_do_not(sent: set[str], never_sent: set[str]) -> None:
    require_head(sent, never_sent)
