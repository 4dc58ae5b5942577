"""Tokenizers of bytes that transformers 5 would take for those of Llama 2."""

import json
from functools import wraps
from pathlib import Path
from typing import Any

OF_LLAMA = ("LlamaTokenizer", "LlamaTokenizerFast")
OF_HUB = ("cache_dir", "revision", "subfolder", "token")  # options by which a file is found


def keep_byte_level_tokenizers() -> None:
    """From now on load a tokenizer as its tokenizer.json describes it, in all of this process.

    transformers 5 replaces the parts of a ``LlamaTokenizer`` that split and join texts, except for some names
    of models. Those of DeepSeek's models, which work on bytes, then lose spaces and line breaks
    (huggingface/transformers#45488).
    """
    from transformers import AutoTokenizer

    load = AutoTokenizer.from_pretrained
    if getattr(load, "_rlhf_stack_keeps_bytes", False):
        return

    @wraps(load)
    def loaded(path: Any, *arguments: Any, **options: Any) -> Any:
        tokenizer = load(path, *arguments, **options)
        if type(tokenizer).__name__ in OF_LLAMA and _is_byte_level(path, options):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path, *arguments, **options)
        return tokenizer

    loaded._rlhf_stack_keeps_bytes = True  # type: ignore[attr-defined]
    AutoTokenizer.from_pretrained = staticmethod(loaded)


def _is_byte_level(path: Any, options: dict[str, Any]) -> bool:
    """Report whether tokenizer.json splits or joins bytes; False without this file."""
    from transformers.utils.hub import cached_file

    of_hub = {name: options[name] for name in OF_HUB if name in options}
    file = cached_file(path, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **of_hub)
    if file is None:
        return False
    content = json.loads(Path(file).read_text(encoding="utf-8"))
    return any('"ByteLevel"' in json.dumps(content.get(part)) for part in ("pre_tokenizer", "decoder"))
