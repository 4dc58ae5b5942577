"""rlhf_stack.compat.byte_level_tokenizers: which tokenizers are loaded as tokenizer.json describes them."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rlhf_stack.compat.byte_level_tokenizers import keep_byte_level_tokenizers

BYTES = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]}, "decoder": None}
METASPACE = {"pre_tokenizer": None, "decoder": {"type": "Metaspace"}}


class LlamaTokenizer:
    """Replaces that of transformers."""


class Qwen2Tokenizer:
    """Replaces that of transformers."""


class PreTrainedTokenizerFast:
    """Replaces that of transformers."""

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> "PreTrainedTokenizerFast":
        return cls()


@pytest.mark.parametrize(
    ("loaded", "content", "kind"),
    [
        (LlamaTokenizer, BYTES, PreTrainedTokenizerFast),
        (LlamaTokenizer, METASPACE, LlamaTokenizer),
        (LlamaTokenizer, None, LlamaTokenizer),
        (Qwen2Tokenizer, BYTES, Qwen2Tokenizer),
    ],
)
def test_a_tokenizer_of_bytes_is_no_llama_tokenizer(
    loaded: type, content: Any, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokenizer.json"
    if content:
        file.write_text(json.dumps(content))
    transformers, hub = ModuleType("transformers"), ModuleType("transformers.utils.hub")
    automatic = type("AutoTokenizer", (), {"from_pretrained": classmethod(lambda *_, **__: loaded())})
    vars(transformers).update(AutoTokenizer=automatic, PreTrainedTokenizerFast=PreTrainedTokenizerFast)
    vars(hub)["cached_file"] = lambda *_, **options: (
        str(file) if content and options["revision"] == "main" else None
    )
    for module in (transformers, ModuleType("transformers.utils"), hub):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    keep_byte_level_tokenizers()
    once = automatic.from_pretrained  # type: ignore[attr-defined]
    keep_byte_level_tokenizers()
    assert automatic.from_pretrained is once  # type: ignore[attr-defined]
    assert type(once(str(tmp_path), use_fast=True, revision="main")) is kind
