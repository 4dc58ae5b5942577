"""The dimensions of a model that determine its memory, from its config.json or from text.

The number of parameters is read from the safetensors files that transformers loads from the folder of the
config.json, or given in the text, or computed by `families`.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeGuard

from rlhf_stack.errors import UserError
from rlhf_stack.inputs import numbers
from rlhf_stack.inputs.files import parse_json_object, read_config, read_json_object
from rlhf_stack.inputs.text import shortened
from rlhf_stack.memory import families, rope_scaling

# Names of GPT-2 for dimensions, and of older families.
ALIASES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "ffn_dim": "intermediate_size",
}
LENGTHS = ("max_position_embeddings", "n_positions")
UNSCALED = ("su", "longrope", "llama3")  # rotary embeddings whose scaling the length includes
VISION = {"in_channels": 3, "temporal_patch_size": 2, "patch_size": 14, "spatial_merge_size": 2, "depth": 32}
VISION |= {"intermediate_size": 3420}  # of Qwen2.5-VL, whose config.json omits its defaults
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
NOT_SIZES = ("recurrent", "attention", "rotary", "estimated")
HEADER = struct.Struct("<Q")  # a safetensors file starts with the length of its JSON header
MOST_PARAMETERS, MOST_SIZE = 10**15, 10**9  # of a model, and of one of its dimensions
LIMIT = 100_000_000  # bytes: maximum length of the header, and of an index


class ShapeError(UserError):
    """The dimensions of a model are unavailable or invalid; the message includes the remedy."""


@dataclass(frozen=True)
class Shape:
    """The dimensions of a decoder. ``parameters`` is the number of stored parameters; 0: computed by formula.

    ``intermediate`` is the width of the MLP, or of one expert. ``experts`` is 0 for a dense model; each token
    uses ``active`` of them. ``cached_layers`` have a cache that grows with the length, 0: all. ``latent`` is
    what latent attention caches for a token, 0 without it. ``max_length`` is the longest sequence in
    tokens, 0 if unknown. ``recurrent``: layers pass a state from token to token. ``attention`` is a feature
    that torch's FlashAttention does not compute, "" without one. ``rotary`` is a scaling of the rotary
    embeddings that vLLM 0.4.2 does not compute, "" without one. ``estimated``: the family is not known.
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
    cached_layers: int = 0
    latent: int = 0
    max_length: int = 0
    recurrent: bool = False
    attention: str = ""
    rotary: str = ""
    estimated: bool = False

    @property
    def embedding(self) -> int:
        """Parameters of the token embedding."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Parameters of one layer, computed by formula."""
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
    def largest(self) -> int:
        """Elements of the largest parameter; transformers 5 has one for all experts of a layer."""
        queries = self.hidden * self.heads * self.head_dim
        return max(self.embedding, queries, self.hidden * self.intermediate * max(1, 2 * self.experts))

    @property
    def value_head_params(self) -> int:
        """Parameters of the model with a value head (a scalar per token) instead of the LM head."""
        return self.total - (0 if self.tied else self.embedding) + self.hidden

    @property
    def mlp_width(self) -> int:
        """Intermediate activations per token and layer."""
        return self.intermediate * (self.active if self.experts else 1)

    @property
    def routed(self) -> int:
        """Elements of the hidden states that the experts of a layer get per token; 0 for a dense model."""
        return self.hidden * self.active if self.experts else 0

    @property
    def expert_block(self) -> int:
        """Parameters of all experts of a layer; 0 for a dense model."""
        return 3 * self.hidden * self.intermediate * self.experts


def read_shape(path: Path) -> Shape:
    """Read the shape from a model folder or a config.json; `ShapeError` if it cannot be determined."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = read_json_object(file)
        stored = sum(_stored(weights) for weights in _loaded(file.parent))
    except UserError as error:
        raise ShapeError(str(error)) from None
    return shape_from_config(config, str(file), stored)


def shape_from_config(config: Mapping[str, Any], name: str = "config.json", stored: int = 0) -> Shape:
    """The shape of a Hugging Face ``config``; ``stored`` is the number of stored parameters, 0 if unknown.

    `ShapeError` names the missing dimension.
    """
    whole = config
    config = config.get("text_config") or config
    if not isinstance(config, Mapping):
        raise ShapeError(f"{name}: text_config is not an object")
    if stored > MOST_PARAMETERS:
        raise ShapeError(f"{name}: {stored} parameters, more than {MOST_PARAMETERS:.0e}")
    config = {ALIASES.get(key, key): value for key, value in config.items()}
    if not isinstance(config.get("model_type") or "", str):
        raise ShapeError(f"{name}: model_type is {shortened(repr(config['model_type'])[:200], 60)}, not text")
    family = families.family_of(config)
    stated = {key: value for key, value in config.items() if value is not None}
    config = {**families.DEFAULTS.get(family, {}), **stated}
    heads, hidden = (_size(config, name, key) for key in ("num_attention_heads", "hidden_size"))
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": max(1, hidden // heads),
        "intermediate_size": 4 * hidden if family == "gpt2" else 0,
    }

    def read(key: str) -> int:
        return _optional(config, name, key) or defaults.get(key, 0)

    for key in ("num_hidden_layers", "vocab_size"):
        _size(config, name, key)
    experts, linear = families.experts(read), families.linear_layers(read, config)
    width = (read("moe_intermediate_size") if experts else 0) or read("intermediate_size")
    if not width:
        raise ShapeError(f"{name}: intermediate_size is missing. {REMEDY}")
    shape = Shape(
        layers=read("num_hidden_layers"),
        hidden=hidden,
        intermediate=width,
        heads=heads,
        kv_heads=read("num_key_value_heads"),
        head_dim=read("head_dim"),
        vocabulary=read("vocab_size"),
        tied=bool(
            config.get("tie_word_embeddings", whole.get("tie_word_embeddings", family in families.TIED))
        ),
        experts=experts,
        active=(read("num_experts_per_tok") or 1) if experts else 0,
        qkv_bias=bool(config.get("attention_bias", family in families.QKV_BIAS)),
        head_norm=family in families.HEAD_NORMS,
        parameters=stored,
        cached_layers=read("num_hidden_layers") - linear if linear else 0,
        latent=(read("kv_lora_rank") + read("qk_rope_head_dim")) if read("kv_lora_rank") else 0,
        max_length=_max_length(config, family),
        recurrent=families.is_recurrent(read, config),
        attention=families.special_attention(read, config, family),
        rotary=rope_scaling.fault(config),
        estimated=not stored and family not in families.KNOWN,
    )
    if stored < shape.embedding:  # beside the config.json are only a part of the weights, or an adapter
        stored, shape = 0, replace(shape, parameters=0, estimated=family not in families.KNOWN)
    for wrong in _contradictions(shape):
        raise ShapeError(f"{name}: {wrong}")
    if stored:
        return shape
    counted = shape.embedding * (1 if shape.tied else 2) + shape.hidden
    counted += families.layer_parameters(read, config, family)
    counted += (read("n_positions") + 1) * hidden if family == "gpt2" else 0  # and the bias of the last norm
    vision = _vision(whole, name)
    counted += vision
    if whole.get("vision_config") and not vision:
        shape = replace(shape, estimated=True)
    return shape if counted == shape.total else replace(shape, parameters=counted)


def _max_length(config: Mapping[str, Any], family: str) -> int:
    """The longest sequence that vLLM accepts; 0 if it is unknown.

    Rotary embeddings may be scaled, all or each kind of layer; the length of Gemma 3 includes that.
    """
    longest = min((config[key] for key in LENGTHS if _is_size(config.get(key))), default=0)
    stated = config.get("model_max_length")  # of Command-R, for which it is more
    longest = max(longest, stated) if longest and _is_size(stated) else longest
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not longest or not rope or not isinstance(rope, Mapping) or family == "gemma3":
        return int(longest)
    found = []
    for part in rope.values() if all(isinstance(one, Mapping) for one in rope.values()) else [rope]:
        kind, factor = part.get("rope_type", part.get("type")), part.get("factor", 1)
        original = part.get("original_max_position_embeddings", longest) if kind == "yarn" else longest
        if kind in UNSCALED:
            factor = 1
        if not _is_size(factor) or not _is_size(original):
            return 0
        found.append(int(original * factor))
    return max(found)


def _is_size(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST_SIZE


def _vision(config: Mapping[str, Any], name: str) -> int:
    """Parameters of the vision part, if it is known."""
    part = config.get("vision_config")
    if not isinstance(part, Mapping):
        return 0
    part = {"model_type": config.get("model_type"), **VISION, **part}  # of older files, which have none
    return families.vision_parameters(part, lambda key: _optional(part, f"{name}: vision_config", key))


REMEDY = (
    "Give its dimensions: --model NAME=layers:28,hidden:3584,intermediate:18944,heads:28,kv_heads:4,"
    "vocabulary:152064 (optional: head_dim, tied, experts, active, parameters, max_length)"
)


def parse_shape(text: str) -> Shape:
    """Parse a text such as ``layers:28,hidden:3584,...``; `ShapeError` names the invalid part."""
    known = [field.name for field in fields(Shape) if field.name not in NOT_SIZES]
    values: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.partition(":")
        if name not in known:
            raise ShapeError(
                f"{shortened(part, 60)!r}: expected NAME:NUMBER with NAME one of {', '.join(known)}"
            )
        if name in values:
            raise ShapeError(f"{shortened(text)!r}: {name} appears twice")
        if value.startswith("-"):
            raise ShapeError(f"{shortened(part, 60)!r}: a dimension must not be negative")
        try:
            number = numbers.decimal(value, 0, MOST_PARAMETERS if name == "parameters" else MOST_SIZE)
        except UserError:
            raise ShapeError(
                f"{shortened(part, 60)!r}: {shortened(value, 60)!r} is not a number of at most {MOST_SIZE:,}"
            ) from None
        if not number.is_integer():
            raise ShapeError(f"{part!r}: {value!r} is not a whole number")
        values[name] = int(number)
    for name in ("tied", "qkv_bias", "head_norm"):
        if values.get(name, 0) > 1:
            raise ShapeError(f"{shortened(text)!r}: {name} is 0 or 1")
    values.setdefault("kv_heads", values.get("heads", 0))
    needed = ("layers", "hidden", "intermediate", "heads", "kv_heads", "vocabulary")
    missing = [name for name in needed if not values.get(name)]
    if not missing:
        values.setdefault("head_dim", values["hidden"] // values["heads"])
    if missing or not values["head_dim"]:
        raise ShapeError(f"{text!r}: missing {', '.join(missing)}. {REMEDY}")
    shape = Shape(
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
        cached_layers=values.get("cached_layers", 0),
        latent=values.get("latent", 0),
        max_length=values.get("max_length", 0),
    )
    for wrong in _contradictions(shape):
        raise ShapeError(f"{shortened(text)!r}: {wrong}")
    return shape


def _contradictions(shape: Shape) -> Iterator[str]:
    """What no model of these sizes has."""
    if shape.heads % shape.kv_heads:
        yield f"{shape.heads} heads are not a multiple of {shape.kv_heads} kv_heads"
    if shape.experts and not shape.active:
        yield "active is missing: how many of the experts each token uses"
    if shape.active > shape.experts:
        yield f"{shape.active} active experts of {shape.experts}"
    if shape.cached_layers > shape.layers:
        yield f"{shape.cached_layers} cached_layers of {shape.layers} layers"
    if 0 < shape.parameters < shape.embedding:
        yield f"{shape.parameters} parameters, fewer than the embedding of its vocabulary"


def _size(config: Mapping[str, Any], name: str, key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 < value <= MOST_SIZE:
        shown = shortened(repr(value)[:200], 60)
        raise ShapeError(f"{name}: {key} is {shown}, expected a positive integer. {REMEDY}")
    return value


def _optional(config: Mapping[str, Any], name: str, key: str) -> int:
    """A dimension that a config may omit, or have as null or 0; then 0."""
    return _size(config, name, key) if config.get(key) else 0


def _loaded(folder: Path) -> Iterable[Path]:
    """The safetensors files that transformers loads from ``folder``; none if one of the index is missing.

    Others there may hold the same weights again, such as Mistral's ``consolidated.safetensors``.
    """
    files = {file.name: file for file in sorted(folder.glob("*.safetensors"))}
    if WHOLE in files:
        return [files[WHOLE]]
    if not (index := folder / INDEX).exists():
        return files.values()
    parts = parse_json_object(read_config(index, LIMIT), str(index)).get("weight_map")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise ShapeError(f"{index}: weight_map is not an object with the name of a file for each parameter")
    named = set(parts.values())
    return [files[part] for part in named] if named <= files.keys() else ()


def _stored(file: Path) -> int:
    """The number of parameters in a safetensors file, from its header."""
    try:
        if not file.is_file():
            raise ShapeError(f"{file}: not a file")
        with file.open("rb") as opened:
            start = opened.read(HEADER.size)
            length = HEADER.unpack(start)[0] if len(start) == HEADER.size else LIMIT + 1
            if length > min(LIMIT, file.stat().st_size):
                raise ShapeError(f"{file}: not a safetensors file")
            header = parse_json_object(opened.read(length), f"{file}: header of safetensors")
    except OSError as error:
        raise ShapeError(f"{file}: {error.strerror or error}") from None
    return sum(_elements(tensor, name, file) for name, tensor in header.items() if name != "__metadata__")


def _elements(tensor: Any, name: str, file: Path) -> int:
    """The number of elements of a tensor in the header of ``file``."""
    shape = tensor.get("shape") if isinstance(tensor, dict) else None
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ShapeError(f"{file}: the header has no valid shape of {shortened(name, 60)}")
    count = math.prod(shape)
    if count > MOST_PARAMETERS:
        raise ShapeError(f"{file}: {shortened(name, 60)} has more than {MOST_PARAMETERS:.0e} elements")
    return count
