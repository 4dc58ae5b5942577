"""The generation configuration of a trained model: transformers 5 does not save an inconsistent one."""

from typing import Any

from rlhf_stack.telemetry import run_log


def make_generation_config_valid(model: Any) -> None:
    """Make ``model``'s generation configuration one that can be saved; logged if it is changed.

    A published model may have a temperature without ``do_sample``. It loads with a warning, and saving it
    raises `ValueError` before the weights are written.
    """
    config = getattr(model, "generation_config", None)
    if config is None or not (reason := _fault(config)):
        return
    config.do_sample = True
    if _fault(config):
        from transformers import GenerationConfig

        ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        model.generation_config = GenerationConfig(**{name: getattr(config, name) for name in ids})
    run_log.warning(f"the model's generation_config.json was changed before it was saved: {reason}")


def _fault(config: Any) -> str:
    try:
        config.validate(strict=True)
    except ValueError as error:
        return " ".join(str(error).split())[:200]
    return ""
