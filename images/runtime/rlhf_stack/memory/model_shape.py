"""The sizes of a model that decide how much memory it needs, from its config.json or typed.

The families whose layers are known here are decoders with gated MLPs and RMS norms. Of another family the
number of parameters is read from the weights beside the config.json, or typed.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlhf_stack.errors import UserError

BIASED = ("qwen2", "qwen2_moe")  # query, key and value have a bias, whatever the config says
NORMED = ("qwen3", "qwen3_moe")  # query and key are normalised by head
DENSE = ("llama", "mistral", "qwen2", "qwen3")
EXPERTS = ("mixtral", "qwen3_moe")
TIED = ("gemma", "gemma2", "gemma3_text")  # where the config leaves it out; elsewhere that means untied
HEADER = struct.Struct("<Q")  # a safetensors file begins with the length of its JSON header
LIMIT = 100_000_000  # bytes of such a header, as the format allows


class ShapeError(UserError):
    """A model whose sizes cannot be had; the text says what to do."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder. ``parameters`` counts each stored number once; 0 means: by formula.

    ``intermediate`` is the MLP's, or that of one expert; ``experts`` is 0 for a dense model, and ``active``
    of them see each token.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    active: int = 0
    qkv_bias: bool = False
    head_norm: bool = False
    parameters: int = 0

    @property
    def embedding(self) -> int:
        """Parameters of the table of tokens."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Parameters of one layer, by formula."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * queries + 2 * self.hidden * keys
        attention += (queries + 2 * keys) * self.qkv_bias + 2 * self.head_dim * self.head_norm
        mlp = 3 * self.hidden * self.intermediate
        if self.experts:
            mlp = self.experts * mlp + self.hidden * self.experts
        return attention + mlp + 2 * self.hidden

    @property
    def total(self) -> int:
        """Parameters of the language model."""
        if self.parameters:
            return self.parameters
        heads = self.embedding * (1 if self.tied else 2)
        return heads + self.layers * self.layer + self.hidden

    @property
    def value_head_params(self) -> int:
        """Parameters with a value head (a number for each token) in place of the language model's."""
        return self.total - (0 if self.tied else self.embedding) + self.hidden

    @property
    def mlp_width(self) -> int:
        """Intermediate numbers that a token makes in a layer."""
        return self.intermediate * (self.active if self.experts else 1)


def read_shape(path: Path) -> Shape:
    """The shape of the model in a folder, or in a config.json; `ShapeError` if it cannot be told."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ShapeError(f"{file}: {error.strerror or error}") from None
    except ValueError as error:
        raise ShapeError(f"{file}: not JSON ({error})") from None
    stored = sum(_stored(weights) for weights in sorted(file.parent.glob("*.safetensors")))
    return shape_from_config(config, str(file), stored)


def shape_from_config(config: Mapping[str, Any], name: str = "config.json", stored: int = 0) -> Shape:
    """The shape that a Hugging Face ``config`` describes; ``stored`` is how many parameters it has, if known.

    `ShapeError` names the sizes that it lacks, or a family that is not known here.
    """
    config = config.get("text_config") or config
    if not isinstance(config, Mapping):
        raise ShapeError(f"{name}: text_config is no object")
    family = str(config.get("model_type", ""))
    if family not in (*DENSE, *EXPERTS) and not stored:
        raise ShapeError(
            f"{name}: how a model of type {family or 'unknown'} is built is not known here, and its weights "
            f"(*.safetensors) are not beside it to be counted; known: {', '.join((*DENSE, *EXPERTS))}. "
            f"{HOW_TO_TYPE}"
        )
    heads = _size(config, name, "num_attention_heads")
    hidden = _size(config, name, "hidden_size")
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    narrow = experts and config.get("moe_intermediate_size")
    return Shape(
        layers=_size(config, name, "num_hidden_layers"),
        hidden=hidden,
        intermediate=int(narrow or _size(config, name, "intermediate_size")),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocabulary=_size(config, name, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", family in TIED)),
        experts=experts,
        active=int(config.get("num_experts_per_tok") or 0) if experts else 0,
        qkv_bias=bool(config.get("attention_bias", family in BIASED)),
        head_norm=family in NORMED,
        parameters=stored,
    )


HOW_TO_TYPE = (
    "Type its sizes: --model NAME=layers:28,hidden:3584,intermediate:18944,heads:28,kv_heads:4,"
    "vocabulary:152064 (and head_dim, tied, experts, active, parameters where they matter)"
)


def parse_shape(text: str) -> Shape:
    """The shape in a text such as ``layers:28,hidden:3584,...``; `ShapeError` says what is wrong with it."""
    known = [field.name for field in fields(Shape)]
    values: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition(":")
        if name not in known:
            raise ShapeError(f"{part!r}: expected NAME:NUMBER with NAME one of {', '.join(known)}")
        try:
            values[name] = int(float(value))
        except (ValueError, OverflowError):
            raise ShapeError(f"{part!r}: {value!r} is no number") from None
        if values[name] < 0:
            raise ShapeError(f"{part!r}: a size is not negative")
    values.setdefault("kv_heads", values.get("heads", 0))
    if values.get("heads") and "hidden" in values:
        values.setdefault("head_dim", values["hidden"] // values["heads"])
    needed = ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary")
    if lacking := [name for name in needed if not values.get(name)]:
        raise ShapeError(f"{text!r} lacks {', '.join(lacking)}. {HOW_TO_TYPE}")
    return Shape(
        layers=values["layers"],
        hidden=values["hidden"],
        intermediate=values["intermediate"],
        heads=values["heads"],
        kv_heads=values["kv_heads"],
        head_dim=values["head_dim"],
        vocabulary=values["vocabulary"],
        tied=bool(values.get("tied")),
        qkv_bias=bool(values.get("qkv_bias")),
        head_norm=bool(values.get("head_norm")),
        experts=values.get("experts", 0),
        active=values.get("active", 0),
        parameters=values.get("parameters", 0),
    )


def _size(config: Mapping[str, Any], name: str, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ShapeError(f"{name}: {key} is {value!r}, and a number is needed. {HOW_TO_TYPE}")
    return value


def _stored(file: Path) -> int:
    """How many numbers a safetensors file holds, by its header alone."""
    with file.open("rb") as opened:
        start = opened.read(HEADER.size)
        length = HEADER.unpack(start)[0] if len(start) == HEADER.size else LIMIT + 1
        if length > LIMIT:
            raise ShapeError(f"{file}: not a safetensors file")
        try:
            header = json.loads(opened.read(length))
        except ValueError:
            raise ShapeError(f"{file}: its header cannot be read") from None
    count = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            numbers = 1
            for size in tensor["shape"]:
                numbers *= size
            count += numbers
    return count
