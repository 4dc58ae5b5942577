"""The kernels that are executed: their inputs, how they are launched, and the results in float64.

The launches are those of vLLM 0.4.2's and DeepSpeed's own C++ code. Names are mangled C++.
"""

import functools
import math
import random
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.hip.inspection import DEEPSPEED_0_15, DEEPSPEED_0_19, VLLM_0_4, Built

Numbers = Sequence[float]
Triple = tuple[int, int, int]
HEAD_SIZES = (64, 80, 96, 112, 128, 256)
PARTITION, THREADS, WAVE = 512, 128, 64
TOKENS, EPSILON = 2, 1e-5  # of activations and norms


@dataclass(frozen=True)
class Type:
    """An element type: its format for `struct`, its names in C++, and the error that it allows."""

    name: str
    format: str
    of_torch: str
    of_attention: str
    tolerance: float

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return struct.calcsize(self.format)

    def encode(self, values: Numbers) -> bytes:
        """Return values, rounded to this type."""
        if self.name != "bfloat16":
            return struct.pack(f"<{len(values)}{self.format}", *values)
        bits = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
        return struct.pack(f"<{len(values)}H", *((u + 0x7FFF + (u >> 16 & 1)) >> 16 for u in bits))

    def decode(self, content: bytes) -> list[float]:
        """Return the values of a buffer."""
        count = len(content) // self.size
        values = struct.unpack(f"<{count}{self.format}", content)
        if self.name != "bfloat16":
            return list(values)
        return list(struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(v << 16 for v in values))))


FLOAT = Type("float32", "f", "f", "f", 1e-5)
HALF = Type("float16", "e", "N3c104HalfE", "t", 4e-3)
BFLOAT = Type("bfloat16", "H", "N3c108BFloat16E", "14__hip_bfloat16", 3e-2)
DOUBLE = Type("float64", "d", "d", "", 1e-6)  # Adam computes in float32 for every type
UINT8 = Type("uint8", "B", "h", "", 0)
INT8 = Type("int8", "b", "a", "", 0)
INT16 = Type("int16", "h", "s", "", 0)
INT32 = Type("int32", "i", "i", "", 0)
INT64 = Type("int64", "q", "l", "", 0)
# What the macros in csrc/dispatch_utils.h of vLLM 0.4.2 dispatch.
FLOATS = (FLOAT, HALF, BFLOAT)
INTEGERS = (UINT8, INT8, INT16, INT32, INT64)


@dataclass(frozen=True)
class Launch:
    """A launch of the kernel whose mangled name has ``kernel``, a regular expression.

    ``values`` are its arguments: ``integer``, ``buffer`` (an index), or ``bytes`` with ``pointers`` in them.
    """

    kernel: str
    grid: Triple
    block: int
    values: tuple[dict[str, Any], ...]
    lds: int = 0


@dataclass(frozen=True)
class Work:
    """Launches that share ``buffers``; ``pointers`` are (buffer, offset, buffer whose address is there).

    ``expected`` has the results by buffer, in float64.
    """

    buffers: tuple[bytes, ...]
    launches: tuple[Launch, ...]
    expected: Mapping[int, tuple[Type, Numbers]]
    pointers: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Case:
    """A kernel with one element type; ``make`` creates its inputs and results."""

    kernel: str
    type: Type
    package: Built
    make: Callable[[], Work] = field(repr=False)
    head_size: int | None = None

    @property
    def id(self) -> str:
        """A name for reports."""
        size = f"-head{self.head_size}" if self.head_size else ""
        return f"{self.kernel}{size}-{self.type.name}"


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for kind in FLOATS:
        for name in GATES:
            yield Case(f"{name}_and_mul", kind, VLLM_0_4, functools.partial(gate_and_mul, name, kind))
        for name in ACTIVATIONS:
            yield Case(name, kind, VLLM_0_4, functools.partial(activation, name, kind))
        yield Case("fused_add_rms_norm", kind, VLLM_0_4, functools.partial(fused_add_rms_norm, kind))
        yield Case("rms_norm", kind, VLLM_0_4, functools.partial(rms_norm, kind))
        yield Case("rotary_embedding", kind, VLLM_0_4, functools.partial(rotary_embedding, kind))
        yield Case("reshape_and_cache", kind, VLLM_0_4, functools.partial(reshape_and_cache, kind))
        yield Case("copy_blocks", kind, VLLM_0_4, functools.partial(copy_blocks, kind))
        for size in HEAD_SIZES:
            for kernel, tokens in (("paged_attention_v1", 35), ("paged_attention_v2", PARTITION + 19)):
                make = functools.partial(paged_attention, kernel, kind, size, tokens)
                yield Case(kernel, kind, VLLM_0_4, make, size)
    for kind in (*FLOATS, DOUBLE):
        yield Case("fused_adam", kind, DEEPSPEED_0_15, functools.partial(fused_adam, kind, INT32))
        yield Case("fused_adam", kind, DEEPSPEED_0_19, functools.partial(fused_adam, kind, INT64))
    yield Case("copy_blocks", UINT8, VLLM_0_4, functools.partial(copy_blocks, UINT8))
    for kind in INTEGERS:
        yield Case("moe_align_block_size", kind, VLLM_0_4, functools.partial(moe_align_block_size, kind))


def worst_error(expected: tuple[Type, Numbers], content: bytes) -> float:
    """Return the largest error, relative to results above 1; infinite if a value is not a number."""
    kind, wanted = expected
    found = kind.decode(content)
    errors = [abs(got - want) / max(1.0, abs(want)) for got, want in zip(found, wanted, strict=True)]
    return max(error if math.isfinite(error) else math.inf for error in errors)


def silu(x: float) -> float:
    """``x`` times its sigmoid."""
    return x / (1 + math.exp(-x))


def gelu(x: float) -> float:
    """``x`` times the normal distribution's probability of less."""
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def gelu_by_tanh(x: float) -> float:
    """The approximation of `gelu` by tanh, of which vLLM has three kernels."""
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


GATES = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_by_tanh}
ACTIVATIONS = {"gelu_new": gelu_by_tanh, "gelu_fast": gelu_by_tanh}


def gate_and_mul(name: str, kind: Type) -> Work:
    """``f(x) * y`` of rows (x, y), f one of `GATES`."""
    width = 130
    given = kind.encode(_uniform(TOKENS * 2 * width, 4))
    rows = _rows(kind.decode(given), 2 * width)
    pairs = (pair for row in rows for pair in zip(row[:width], row[width:], strict=True))
    wanted = [GATES[name](x) * y for x, y in pairs]
    return _activated(f"act_and_mul_kernelI{kind.of_torch}.*[0-9]{name}_kernel", kind, given, wanted)


def activation(name: str, kind: Type) -> Work:
    """``f(x)``, f one of `ACTIVATIONS`."""
    given = kind.encode(_uniform(TOKENS * 130, 2))
    wanted = [ACTIVATIONS[name](x) for x in kind.decode(given)]
    return _activated(f"17activation_kernelI{kind.of_torch}.*[0-9]{name}_kernel", kind, given, wanted)


def _activated(kernel: str, kind: Type, given: bytes, wanted: Numbers) -> Work:
    """A launch of a block for each of `TOKENS` rows, whose results are ``wanted``."""
    width = len(wanted) // TOKENS
    return Work(
        (bytes(len(wanted) * kind.size), given),
        (_launch(kernel, (TOKENS, 1, 1), width, [0, 1], width),),
        {0: (kind, wanted)},
    )


def fused_add_rms_norm(kind: Type) -> Work:
    """`rms_norm` of the sum of input and residual, which replaces the residual.

    The width is no multiple of 8, for which vLLM launches the kernel without vectors.
    """
    width = 252
    given, residual = (kind.encode(_normal(TOKENS * width, seed)) for seed in range(2))
    weight = kind.encode(_uniform(width, 2))
    added = [x + y for x, y in zip(kind.decode(given), kind.decode(residual), strict=True)]
    return Work(
        (given, residual, weight),
        (_norm(f"25fused_add_rms_norm_kernelI{kind.of_torch}Li0E", width),),
        {0: (kind, _normalized(added, kind.decode(weight))), 1: (kind, added)},
    )


def rms_norm(kind: Type) -> Work:
    """Rows divided by their root mean square, times a weight."""
    width = 256
    given, weight = kind.encode(_normal(TOKENS * width)), kind.encode(_uniform(width, 2))
    return Work(
        (bytes(len(given)), given, weight),
        (_norm(f"15rms_norm_kernelI{kind.of_torch}E", width),),
        {0: (kind, _normalized(kind.decode(given), kind.decode(weight)))},
    )


def _norm(kernel: str, width: int) -> Launch:
    values = (*_buffers(0, 1, 2), _float(EPSILON), _integer(TOKENS), _integer(width))
    return Launch(kernel, (TOKENS, 1, 1), width, values)


def _normalized(values: Numbers, weights: Numbers) -> list[float]:
    wanted = []
    for row in _rows(values, len(weights)):
        scale = 1 / math.sqrt(sum(x * x for x in row) / len(weights) + EPSILON)
        wanted += [x * scale * w for x, w in zip(row, weights, strict=True)]
    return wanted


def rotary_embedding(kind: Type) -> Work:
    """GPT-NeoX's rotation of query and key by the position of a token."""
    size, heads, kv_heads, positions = 64, 2, 1, (5, 11)
    half = size // 2
    query, key = kind.encode(_normal(2 * heads * size)), kind.encode(_normal(2 * kv_heads * size))
    angles = [[p / 10000 ** (2 * i / size) for i in range(half)] for p in range(12)]
    cache = kind.encode([f(a) for row in angles for f in (math.cos, math.sin) for a in row])
    table = _rows(kind.decode(cache), size)

    def rotated(content: bytes, count: int) -> list[float]:
        wanted = []
        for number, head in enumerate(_rows(kind.decode(content), size)):
            row = table[positions[number // count]]
            pairs = zip(head[:half], head[half:], row[:half], row[half:], strict=True)
            both = [(x * cos - y * sin, y * cos + x * sin) for x, y, cos, sin in pairs]
            wanted += [x for x, _ in both] + [y for _, y in both]
        return wanted

    sizes = (size, heads * size, kv_heads * size, heads, kv_heads, size)
    values = (*_buffers(0, 1, 2, 3), *map(_integer, sizes))
    kernel = f"23rotary_embedding_kernelI{kind.of_torch}Lb1E"
    return Work(
        (struct.pack("<2q", *positions), query, key, cache),
        (Launch(kernel, (2, 1, 1), heads * half, values),),
        {1: (kind, rotated(query, heads)), 2: (kind, rotated(key, kv_heads))},
    )


def reshape_and_cache(kind: Type) -> Work:
    """Keys and values written to the slots of the cache; a token without a slot is ignored."""
    tokens, heads, size, block, blocks = 3, 2, 64, 16, 3
    lanes = 16 // kind.size
    slots = (37, -1, 4)
    given = [kind.encode(_normal(tokens * heads * size, seed)) for seed in range(2)]
    keys, values = (kind.decode(content) for content in given)
    caches = [[0.0] * (blocks * heads * size * block) for _ in range(2)]
    for token, slot in ((token, slot) for token, slot in enumerate(slots) if slot >= 0):
        for head in range(heads):
            for i in range(size):
                place = slot // block * heads + head
                source = (token * heads + head) * size + i
                at = ((place * (size // lanes) + i // lanes) * block + slot % block) * lanes + i % lanes
                caches[0][at] = keys[source]
                caches[1][(place * size + i) * block + slot % block] = values[source]
    zero = bytes(len(caches[0]) * kind.size)
    stride = heads * size
    numbers = (stride, stride, heads, size, block, lanes)
    arguments = (*_buffers(2, 3, 0, 1, 4), *map(_integer, numbers), _float(1.0))
    kernel = f"24reshape_and_cache_kernelI{kind.of_attention}.*Lb0E"
    return Work(
        (zero, zero, *given, struct.pack(f"<{tokens}q", *slots)),
        (Launch(kernel, (tokens, 1, 1), stride, arguments),),
        {0: (kind, caches[0]), 1: (kind, caches[1])},
    )


def copy_blocks(kind: Type) -> Work:
    """Blocks of two layers' caches copied to other blocks."""
    layers, blocks, size, pairs = 2, 4, 200, ((0, 3), (2, 1))
    draw = _bytes if kind == UINT8 else _normal
    given = [kind.encode(draw(blocks * size, seed)) for seed in range(2 * layers)]
    wanted: dict[int, tuple[Type, Numbers]] = {}
    for number, content in enumerate(given):
        rows = _rows(kind.decode(content), size)
        for source, target in pairs:
            rows[target] = rows[source]
        wanted[3 + number] = (kind, [value for row in rows for value in row])
    mapping = struct.pack("<4q", *(block for pair in pairs for block in pair))
    pointers = tuple((which, 8 * layer, 3 + which * layers + layer) for which in (0, 1) for layer in range(2))
    return Work(
        (bytes(8 * layers), bytes(8 * layers), mapping, *given),
        (_launch(f"copy_blocks_kernelI{kind.of_torch}E", (layers, len(pairs), 1), 128, [0, 1, 2], size),),
        wanted,
        pointers,
    )


def paged_attention(kernel: str, kind: Type, size: int, tokens: int) -> Work:
    """Attention of two heads, which share one of the cache, over blocks in any order."""
    heads, block, lanes = 2, 16, 16 // kind.size
    filled = -(-tokens // block)
    order = random.Random(tokens).sample(range(filled + 1), filled)  # noqa: S311
    query = kind.encode(_normal(heads * size))
    drawn = (kind.encode(_normal(tokens * size, seed)) for seed in range(2))
    keys, values = (_rows(kind.decode(content), size) for content in drawn)
    cached = [[0.0] * ((filled + 1) * size * block) for _ in range(2)]
    for token in range(tokens):
        place, at = order[token // block], token % block
        for i in range(size):
            cell = ((place * (size // lanes) + i // lanes) * block + at) * lanes + i % lanes
            cached[0][cell] = keys[token][i]
            cached[1][(place * size + i) * block + at] = values[token][i]
    wanted = []
    for head in _rows(kind.decode(query), size):
        scores = [sum(a * b for a, b in zip(head, key, strict=True)) * size**-0.5 for key in keys]
        weights = [math.exp(score - max(scores)) for score in scores]
        wanted += [
            sum(w * value[i] for w, value in zip(weights, values, strict=True)) / sum(weights)
            for i in range(size)
        ]
    zero = bytes(heads * size * kind.size)
    inputs = (query, *(kind.encode(cache) for cache in cached))
    tables = (struct.pack(f"<{filled}i", *order), struct.pack("<i", tokens))
    numbers = (filled, 0, heads * size, size * block, size * block)  # 0: no alibi slopes
    tail = (_integer(1), _float(size**-0.5), *_buffers(4, 5), *map(_integer, numbers), _float(1.0))
    name = f"{kernel}_kernelI{kind.of_attention}.*Li{size}ELi{block}ELi{THREADS}ELb0E"
    outputs = THREADS // WAVE // 2 * size * 4
    if kernel == "paged_attention_v1":
        lds = max(filled * block * 4, outputs)
        first = Launch(name, (heads, 1, 1), THREADS, (*_buffers(0, 1, 2, 3), *tail), lds)
        return Work((zero, *inputs, *tables), (first,), {0: (kind, wanted)})
    parts = -(-tokens // PARTITION)
    sums, partial = bytes(heads * parts * 4), bytes(heads * parts * size * kind.size)
    first = Launch(
        name,
        (heads, 1, parts),
        THREADS,
        (*_buffers(6, 7, 8, 1, 2, 3), *tail),
        max(PARTITION * 4, outputs),
    )
    reduce = Launch(
        f"{kernel}_reduce_kernelI{kind.of_attention}Li{size}E",
        (heads, 1, 1),
        THREADS,
        (*_buffers(0, 6, 7, 8, 5), _integer(parts)),
        2 * parts * 4,
    )
    return Work((zero, *inputs, *tables, sums, sums, partial), (first, reduce), {0: (kind, wanted)})


def fused_adam(kind: Type, count: Type) -> Work:
    """A step of AdamW on two tensors, of which one has two chunks; ``count``: the type of their sizes."""
    chunk, sizes, step = 600, (1000, 77), 3
    # A rate at which no tensor is left as it was within the tolerance of bfloat16.
    beta1, beta2, epsilon, rate, decay = 0.9, 0.95, 1e-8, 0.1, 0.1
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    drawn = ([kind.encode(_normal(size, seed)) for size in sizes] for seed in range(3))
    gradient, parameter, mean = drawn
    square = [kind.encode([abs(x) for x in _normal(size, 3)]) for size in sizes]
    wanted: dict[int, tuple[Type, Numbers]] = {}
    for tensor in range(len(sizes)):
        results: list[list[float]] = [[], [], []]
        read = [kind.decode(one[tensor]) for one in (gradient, parameter, mean, square)]
        for g, p, first, second in zip(*read, strict=True):
            m, v = beta1 * first + (1 - beta1) * g, beta2 * second + (1 - beta2) * g * g
            update = m / correction1 / (math.sqrt(v / correction2) + epsilon) + decay * p
            for result, value in zip(results, (p - rate * update, m, v), strict=True):
                result.append(value)
        wanted |= {2 * (number + 1) + tensor: (kind, result) for number, result in enumerate(results)}
    blocks = [(tensor, number) for tensor, size in enumerate(sizes) for number in range(-(-size // chunk))]
    # TensorListMetadata<4>: addresses[4][36], sizes[36], block_to_tensor[320], block_to_chunk[320], an int.
    tensors = bytes(4 * 36 * 8)
    lists = count.encode([*sizes, *[0] * (36 - len(sizes))])
    lists += bytes(tensor for tensor, _ in blocks).ljust(320, b"\0")
    lists += struct.pack("<320i", *(number for _, number in blocks), *[0] * (320 - len(blocks)))
    pointers = [((of * 36 + tensor) * 8, 2 * of + tensor) for of in range(4) for tensor in range(len(sizes))]
    metadata = {"bytes": (tensors + lists + bytes(8)).hex(), "pointers": pointers}
    settings = (beta1, beta2, correction1, correction2, epsilon, rate)
    values = (
        _integer(chunk),
        {"buffer": 8},
        metadata,
        _integer(0),  # AdamFunctor, which is empty
        *map(_float, settings),
        _integer(1),  # AdamW
        _float(decay),
    )
    kernel = f"multi_tensor_apply_kernelI18TensorListMetadataILi4EE11AdamFunctorI{kind.of_torch}iE"
    buffers = (*gradient, *parameter, *mean, *square, bytes(4))
    return Work(buffers, (Launch(kernel, (len(blocks), 1, 1), 512, values),), wanted)


def moe_align_block_size(kind: Type) -> Work:
    """Tokens sorted by expert, each expert's padded to whole blocks."""
    experts, block = 8, 4
    chosen = [5, 1, 0, 5, 2, 1, 2, 1, 2, 3, 0, 3, 4, 7, 7, 7, 7, 7, 6]
    padding = len(chosen)
    by_expert = [[i for i, expert in enumerate(chosen) if expert == number] for number in range(experts)]
    padded = [one + [padding] * (-len(one) % block) for one in by_expert]
    order = [i for one in padded for i in one]
    owners = [number for number, one in enumerate(padded) for _ in range(len(one) // block)]
    fill = INT32.encode([padding] * len(order))
    values = (*_buffers(0, 1, 2, 3), *map(_integer, (experts, block, len(chosen))))
    kernel = f"moe_align_block_size_kernelI{kind.of_torch}E"
    return Work(
        (kind.encode(chosen), fill, bytes(4 * len(owners)), bytes(4)),
        (Launch(kernel, (1, 1, 1), experts, values, (experts + 1) * (experts + 1) * 4),),
        {1: (INT32, order), 2: (INT32, owners), 3: (INT32, [len(order)])},
    )


def find(names: Sequence[str], pattern: str) -> str:
    """Return the one kernel whose name has ``pattern``; `LookupError` if there is none or another."""
    found = [name for name in names if re.search(pattern, name)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} kernels are called {pattern}")
    return found[0]


def _launch(kernel: str, grid: Triple, block: int, buffers: Sequence[int], *numbers: int) -> Launch:
    return Launch(kernel, grid, block, (*_buffers(*buffers), *map(_integer, numbers)))


def _buffers(*indices: int) -> tuple[dict[str, Any], ...]:
    return tuple({"buffer": index} for index in indices)


def _integer(value: int) -> dict[str, Any]:
    return {"integer": value}


def _float(value: float) -> dict[str, Any]:
    return {"integer": struct.unpack("<i", struct.pack("<f", value))[0]}


def _rows(values: Sequence[float], width: int) -> list[list[float]]:
    return [list(values[at : at + width]) for at in range(0, len(values), width)]


def _uniform(count: int, limit: float) -> list[float]:
    generator = random.Random(count)  # noqa: S311
    return [generator.uniform(-limit, limit) for _ in range(count)]


def _normal(count: int, seed: int = 0) -> list[float]:
    generator = random.Random(f"{count} {seed}")  # noqa: S311
    return [generator.gauss(0, 1) for _ in range(count)]


def _bytes(count: int, seed: int = 0) -> list[int]:
    return list(random.Random(f"{count} {seed}").randbytes(count))  # noqa: S311
