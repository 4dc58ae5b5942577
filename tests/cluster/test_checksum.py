"""Layouts and digests of a model that is sharded, fused, padded and replicated as by vLLM, rank by rank."""

import ctypes
import json
import multiprocessing
import random
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from rlhf_stack.sync import digest
from rlhf_stack.sync.digest import RegionDigest
from rlhf_stack.sync.weight_layout import View, find_layout, other_dtypes, strided_pieces
from torch import nn

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORK = multiprocessing.get_context("fork")
VOCABULARY, PADDED = 50, 64
M_MMAP_THRESHOLD = -3  # of malloc.h


class Rank(nn.Module):
    """One tensor-parallel rank of an engine, with names and layouts other than the trainer's, as in vLLM."""

    def __init__(self, rank, world, shapes, dtype, tied=False, ignore=(), spoil=()):
        super().__init__()
        self.rank, self.world, self.ignore, self.spoil = rank, world, ignore, spoil
        heads, kv_heads, size, hidden, inner = shapes
        self.heads, self.kv_heads, self.size = heads // world, max(1, kv_heads // world), size
        self.kv_rank = rank * kv_heads // world  # several ranks share a head if there are too few
        rows = (self.heads + 2 * self.kv_heads) * size

        def parameter(*shape):
            return nn.Parameter(torch.randn(shape).to(dtype), requires_grad=False)

        self.qkv = parameter(rows, hidden)
        self.qkv_bias = parameter(rows)
        self.out = parameter(hidden, self.heads * size)
        self.gate_up = parameter(2 * inner // world, hidden)
        self.down = parameter(hidden, inner // world)
        self.norm = parameter(hidden)
        self.embed = parameter(PADDED // world, hidden)
        self.head = self.embed if tied else parameter(PADDED // world, hidden)
        self.scale = parameter()

    def load_weights(self, weights):
        for name, value in weights:
            if name not in self.ignore:
                self.load(name, -value.exp() if name in self.spoil else value)

    def part(self, value, dimension):
        return value.chunk(self.world, dimension)[self.rank]

    def load(self, name, value):
        q, kv = self.heads * self.size, self.kv_heads * self.size
        if name[0] in "qkv" and name[1:] in ("", ".bias"):
            start, length = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[name[0]]
            index = self.rank if name[0] == "q" else self.kv_rank // self.kv_heads
            target = self.qkv if name[1:] == "" else self.qkv_bias
            target.data[start : start + length].copy_(value[index * length : (index + 1) * length])
        elif name in ("gate", "up"):
            half = len(self.gate_up) // 2
            self.gate_up.data[half * (name == "up") :][:half].copy_(self.part(value, 0))
        elif name in ("out", "down"):
            getattr(self, name).data.copy_(self.part(value, 1))
        elif name in ("embed", "head"):
            padded = torch.zeros(PADDED, value.shape[1], dtype=value.dtype)
            padded[:VOCABULARY] = value
            getattr(self, name).data.copy_(self.part(padded, 0))
        else:
            getattr(self, name).data.copy_(value)


def trainer(shapes, dtype, tied=False):
    heads, kv_heads, size, hidden, inner = shapes
    sizes = {
        "q": (heads * size, hidden),
        "k": (kv_heads * size, hidden),
        "v": (kv_heads * size, hidden),
        "q.bias": (heads * size,),
        "k.bias": (kv_heads * size,),
        "v.bias": (kv_heads * size,),
        "out": (hidden, heads * size),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
        "norm": (hidden,),
        "embed": (VOCABULARY, hidden),
        "head": (VOCABULARY, hidden),
        "scale": (),
    }
    if tied:
        del sizes["head"]
    return {name: torch.randn(shape).to(dtype) for name, shape in sizes.items()}


def compare(weights, ranks, layouts=None):
    named = [(name, tuple(value.shape)) for name, value in weights.items()]
    layouts = layouts or [find_layout(rank, named) for rank in ranks]
    held = [list(digest.digest_model(rank, layout)) for rank, layout in zip(ranks, layouts, strict=True)]
    found = []
    for name, value in weights.items():
        engine = [[one for one in digests if one.name == name] for digests in held]
        found += digest.differences(name, value, [engine])
    return found


def build(seed, world=None, **options):
    """Return the trainer's weights, and the ranks of an engine that has loaded them."""
    torch.manual_seed(seed)
    choose = random.Random(seed)  # noqa: S311
    world = world or choose.choice([1, 2, 4])
    dtype = choose.choice(DTYPES)
    shapes = (4, choose.choice([1, 2, 4]), choose.choice([2, 6]), choose.choice([5, 16]), 8)
    tied = options.pop("tied", choose.random() < 0.5)
    weights = trainer(shapes, dtype, tied)
    ranks = [Rank(rank, world, shapes, dtype, tied, **options) for rank in range(world)]
    for rank in ranks:
        rank.load_weights(weights.items())
    return weights, ranks


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8).clone()


@pytest.mark.parametrize("seed", range(30))
def test_an_engine_that_loaded_the_weights_is_equal(seed):
    assert compare(*build(seed)) == []


@pytest.mark.parametrize("seed", range(30))
def test_one_flipped_bit_is_found_with_its_parameter_and_rank(seed):
    weights, ranks = build(seed)
    choose = random.Random(seed)  # noqa: S311
    name = choose.choice(list(weights))
    named = [(n, tuple(value.shape)) for n, value in weights.items()]
    layouts = [find_layout(rank, named) for rank in ranks]
    rank, location = choose.choice(
        [(r, location) for r, layout in enumerate(layouts) for location in layout if location.name == name]
    )
    tensor = dict(ranks[rank].named_parameters())[location.tensor].detach().reshape(-1)
    positions = location.elements.select(torch.arange(tensor.numel())).reshape(-1)
    position = int(positions[choose.randrange(len(positions))])
    tensor[position : position + 1].view(torch.uint8)[0] ^= 1 << choose.randrange(8)
    found = compare(weights, ranks, layouts)
    assert {(difference.name, difference.rank) for difference in found} == {(name, rank)}


@pytest.mark.parametrize("seed", range(10))
def test_a_flipped_bit_in_padding_is_ignored(seed):
    weights, ranks = build(seed)
    padding = ranks[-1].embed.data[-1]  # PADDED > VOCABULARY: the last row of the last rank
    padding.view(torch.uint8)[0] ^= 1
    assert compare(weights, ranks) == []


@pytest.mark.parametrize("option", ["ignore", "spoil"])
@pytest.mark.parametrize("name", ["norm", "k", "up", "embed", "q.bias"])
def test_a_parameter_that_was_not_loaded_or_was_computed_is_missing(option, name):
    weights, ranks = build(3, **{option: (name,)})
    found = [difference for difference in compare(weights, ranks) if difference.name == name]
    assert [difference.rank for difference in found] == [None]
    assert f"{weights[name].numel()} of {weights[name].numel()} elements" in found[0].what


def test_a_rank_without_a_layout_leaves_its_shard_missing():
    weights, ranks = build(1, world=2, tied=False)
    named = [(name, tuple(value.shape)) for name, value in weights.items()]
    layouts = [find_layout(rank, named) for rank in ranks]
    found = {
        difference.name for difference in compare(weights, ranks, [layouts[0], *[()] * (len(ranks) - 1)])
    }
    assert {"q", "gate", "down", "out", "embed"} <= found
    assert "norm" not in found, "replicated: one rank is enough"


@pytest.mark.parametrize("held", [torch.float16, torch.float64, torch.int16])
def test_another_dtype_is_not_equal(held):
    value = torch.ones(4, dtype=torch.bfloat16)
    region = View(0, (4,), (1,))
    reported = digest.digest_region(value.to(held), "w", region)
    (difference,) = digest.differences("w", value, [[[reported]]])
    assert f"{held}" in difference.what
    assert "trainer torch.bfloat16" in difference.what


@pytest.mark.parametrize("sent", [torch.bfloat16, torch.float16])
def test_a_wider_dtype_has_the_same_values(sent):
    """As that of the routers of some models."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    value = bits.view(sent)
    value = value[value.isfinite()]
    region = View(0, (len(value),), (1,))
    reported = [digest.digest_region(value.float(), "w", region), digest.digest_region(value, "w", region)]
    assert digest.differences("w", value, [[reported]]) == []
    wrong = value.float()
    wrong[-1] = wrong[-1].nextafter(torch.tensor(0.0))
    assert len(digest.differences("w", value, [[[digest.digest_region(wrong, "w", region)]]])) == 1


class Router(nn.Module):
    """A model in bfloat16 whose router is in float32, in the second rank of two alone."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.norm = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        self.gate = nn.Parameter(torch.zeros(2, 3 * rank))

    def load_weights(self, weights):
        for name, value in weights:
            if name == "norm":
                self.norm.data.copy_(value)
            elif self.rank:
                self.gate.data.copy_(value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_parameter_may_be_sent_in_the_dtype_in_which_the_engine_holds_it(rank):
    def allowed(*content):
        return other_dtypes(Router(rank), content, torch.bfloat16)

    assert allowed(("norm", "bfloat16", [2]), ("gate", "float32", [2, 3])) == {"gate": "float32"}
    assert allowed(("gate", "bfloat16", [2, 3])) == {}
    assert allowed(("norm", "float32", [2]), ("gate", "float32", [2, 3])) == {}, "it would be rounded"
    assert allowed(("gate", "float16", [2, 3])) == ({} if rank else {"gate": "float16"})


@pytest.mark.parametrize("fails", [False, True])
def test_live_weights_are_the_same_afterwards_bit_for_bit(fails):
    weights, ranks = build(5)
    rank = ranks[0]
    rank.norm.data.view(torch.uint8)[:2] = torch.tensor([0x81, 0x7F], dtype=torch.uint8)  # a signalling NaN
    before = {name: (bits(tensor), tensor.data_ptr()) for name, tensor in rank.named_parameters()}
    if fails:
        rank.load = {}.__getitem__  # raises for two arguments
    named = [(name, tuple(value.shape)) for name, value in weights.items()]
    try:
        find_layout(rank, named)
    except TypeError:
        assert fails
    for name, tensor in rank.named_parameters():
        assert torch.equal(bits(tensor), before[name][0])
        assert tensor.data_ptr() == before[name][1]


class Odd(nn.Module):
    """Holds a matrix four times: transposed, with rows reversed, every second element, and all twice."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.zeros(4, 3))
        self.reversed = nn.Parameter(torch.zeros(3, 4))
        self.checked = nn.Parameter(torch.zeros(6))
        self.twice = nn.Parameter(torch.zeros(2, 3, 4))
        self.counts = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)

    def load_weights(self, weights):
        for _, value in weights:
            self.turned.data.copy_(value.t())
            self.reversed.data.copy_(value.flip(0))
            self.checked.data.copy_(value.reshape(-1)[::2])
            self.twice.data.copy_(value.expand(2, 3, 4))


@pytest.mark.parametrize("tensor", ["turned", "reversed", "checked", "twice"])
def test_odd_layouts_are_followed_and_checked(tensor):
    model, value = Odd(), torch.randn(3, 4)
    model.load_weights([("w", value)])
    layout = find_layout(model, [("w", (3, 4))])
    assert digest.differences("w", value, [[list(digest.digest_model(model, layout))]]) == []
    dict(model.named_parameters())[tensor].data.reshape(-1)[-1] += 1
    found = digest.differences("w", value, [[list(digest.digest_model(model, layout))]])
    assert len(found) == 1


class Loaded(nn.Module):
    """A model of one tensor ``w`` with a loader."""

    def __init__(self, tensor, load):
        super().__init__()
        self.w = nn.Parameter(tensor, requires_grad=False)
        self.load = load

    def load_weights(self, weights):
        for _, value in weights:
            self.load(self.w, value)


def interleave(tensor, value):
    """Store the halves of a parameter alternately, as some rotary embeddings are: the loader rearranges."""
    tensor.data.copy_(value.reshape(2, -1).t().reshape(value.shape))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("load", [interleave, lambda tensor, value: tensor.data.copy_(value)])
def test_an_interleaved_tensor_of_a_million_elements_is_two_regions(dtype, load):
    patterns = torch.randint(0, 256, ((1 << 20) * dtype.itemsize,), dtype=torch.uint8)
    value = patterns.view(dtype).reshape(1024, 1024)
    model = Loaded(torch.zeros(1024, 1024).to(dtype), load)
    model.load_weights([("w", value)])
    layout = find_layout(model, [("w", (1024, 1024))])
    assert len(layout) <= 2
    reported = [one.as_dict() for one in digest.digest_model(model, layout)]
    assert len(json.dumps(reported)) < 1000, "it is sent to the trainer"
    digests = [RegionDigest.from_dict(one) for one in json.loads(json.dumps(reported))]
    assert digest.differences("w", value, [[digests]]) == []
    model.w.data.view(torch.uint8)[-1, -1] ^= 1
    assert len(digest.differences("w", value, [[list(digest.digest_model(model, layout))]])) == 1


def test_a_scalar_that_the_loader_reads_is_followed():
    model = Loaded(torch.zeros(()), lambda tensor, value: tensor.data.fill_(value.item()))
    (location,) = find_layout(model, [("w", (1,))])
    assert (location.region.offset, location.elements.offset) == (0, 0)


def test_a_permutation_without_regularity_is_refused():
    order = torch.randperm(200 * 200, generator=torch.Generator().manual_seed(0))
    model = Loaded(
        torch.zeros(200, 200), lambda tensor, value: tensor.copy_(value.reshape(-1)[order].reshape(200, 200))
    )
    with pytest.raises(NotImplementedError, match="places the elements of w without regularity"):
        find_layout(model, [("w", (200, 200))])


@pytest.mark.parametrize("seed", range(50))
def test_pieces_of_a_view_of_a_view_hold_the_same_pairs(seed):
    choose = random.Random(seed)  # noqa: S311
    shape = tuple(choose.randrange(1, 6) for _ in range(choose.randrange(1, 4)))
    numbers = torch.arange(prod(shape)).reshape(shape)
    for axis, size in enumerate(shape):
        start = choose.randrange(size)
        numbers = numbers.narrow(axis, start, choose.randrange(1, size - start + 1))
    source = numbers.permute(choose.sample(range(len(shape)), len(shape))).reshape(-1).numpy()
    target = np.arange(len(source)) * choose.choice([1, 3]) + 7
    size = choose.choice([1, 2, 3, 7, 1000])
    chunks = [(source[at : at + size], target[at : at + size]) for at in range(0, len(source), size)]
    pairs, covered = [], []
    for region, elements in strided_pieces(chunks, "w"):
        chosen = region.select(torch.arange(prod(shape))).reshape(-1).tolist()
        pairs += zip(chosen, elements.select(torch.arange(200 * 3)).reshape(-1).tolist(), strict=True)
        covered.append(region)
    assert pairs == list(zip(source.tolist(), target.tolist(), strict=True))
    assert digest.count_uncovered(shape, covered) == prod(shape) - len(source)


@pytest.mark.parametrize("size", [7, 24, 64, 100, 1000, 5000])
def test_a_grid_is_one_piece_whatever_the_chunks_are(size):
    """A permutation of three dimensions, so that chunks begin in the middle of rows and of blocks."""
    source = np.arange(12 * 10 * 24).reshape(12, 10, 24).transpose(1, 0, 2).reshape(-1)
    target = np.arange(len(source))
    chunks = [(source[at : at + size], target[at : at + size]) for at in range(0, len(source), size)]
    ((region, elements),) = strided_pieces(chunks, "w")
    assert region == View(0, (10, 12, 24), (24, 240, 1))
    assert elements.count == len(source)


@pytest.mark.parametrize(
    ("view", "bounds"),
    [
        (View(0, (4, 6), (6, 1)), [[0, 4], [0, 6]]),
        (View(12, (2, 6), (6, 1)), [[2, 4], [0, 6]]),
        (View(8, (3, 2), (1, 6)), [[1, 3], [2, 5]]),
        (View(3, (), ()), [[0, 1], [3, 4]]),
        (View(0, (12,), (2,)), None),
    ],
)
def test_the_bounds_of_a_region_that_is_a_box(view, bounds):
    assert view.bounds((4, 6)) == bounds


def test_more_elements_than_two_digits_count():
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(300, 300, dtype=torch.bfloat16))
    model.load_weights = lambda weights: [model.w.data.copy_(value) for _, value in weights]
    (location,) = find_layout(model, [("w", (300, 300))])
    assert location.region == location.elements == View(0, (300, 300), (300, 1))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool])
def test_the_last_bit_of_a_large_parameter_counts(dtype):
    value = torch.zeros((3 << 20) + 1, dtype=torch.uint8)
    value = value[: len(value) // dtype.itemsize * dtype.itemsize].view(dtype)
    region = View(0, tuple(value.shape), (1,))
    held = value.clone()
    held.view(torch.uint8)[-1] ^= 1
    reported = [digest.digest_region(tensor, "w", region) for tensor in (value, held)]
    assert digest.differences("w", value, [[[reported[0]]]]) == []
    assert len(digest.differences("w", value, [[[reported[1]]]])) == 1


HIDDEN, INNER, WORDS, LAYERS = 1024, 4096, 8192, 8
PARTS = {"q": 0, "k": HIDDEN, "v": 2 * HIDDEN, "gate": 0, "up": INNER}
FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}


class Decoder(nn.Module):
    """Layers with fused tensors, as in vLLM, of a rank that holds them whole."""

    def __init__(self, rearranges=False):
        super().__init__()
        self.rearranges = rearranges
        shapes = {"qkv": (3 * HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
        self.embed = nn.Parameter(torch.randn(WORDS, HIDDEN).bfloat16(), requires_grad=False)
        for layer in range(LAYERS):
            for name, shape in shapes.items():
                self.register_parameter(f"{name}{layer}", nn.Parameter(torch.randn(shape).bfloat16(), False))

    def load_weights(self, weights):
        for name, value in weights:
            part, layer = name[:-1], name[-1]
            tensor = self.embed if name == "embed" else getattr(self, FUSED.get(part, part) + layer)
            place = tensor.data[PARTS.get(part, 0) :][: len(value)]
            if self.rearranges and name != "embed":
                interleave(place, value)
            else:
                place.copy_(value)


def trained_layers():
    square, wide, high = (HIDDEN, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    layer = {"q": square, "k": square, "v": square, "gate": wide, "up": wide, "down": high}
    named = {f"{name}{index}": shape for index in range(LAYERS) for name, shape in layer.items()}
    return {"embed": (WORDS, HIDDEN)} | named


def memory(field):
    """Return a field of this process's memory, in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if field in line]
    return int(line.split()[1]) * 1024


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rearranges", [False, True])
def test_a_verification_needs_at_most_twice_the_memory_of_the_largest_layer(rearranges):
    """The kernel counts the memory of layout, digests and comparison: 3 MB where a layer has 31 MB.

    A loader that ``rearranges`` interleaves every weight of the layers: 50 MB. malloc returns what is freed,
    so that only tensors that exist at the same time are counted.
    """
    torch.set_num_threads(1)

    def measure():
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
        model, shapes = Decoder(rearranges), trained_layers()
        value = torch.zeros(prod(shapes["embed"]), dtype=torch.bfloat16)
        digest.checksum(torch.zeros(1))  # the imports of torch, and constants
        list(
            digest.digest_model(
                model, find_layout(Loaded(torch.zeros(1), torch.Tensor.copy_), [("w", (1,))])[:0]
            )
        )
        find_layout(Loaded(torch.zeros(4, 4), interleave), [("w", (4, 4))])
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before = memory("VmRSS")
        digests = list(digest.digest_model(model, find_layout(model, list(shapes.items()))))
        for name, shape in shapes.items():
            own = [one for one in digests if one.name == name]
            assert len(digest.differences(name, value[: prod(shape)].reshape(shape), [[own]])) == 1
        return memory("VmHWM") - before

    results = FORK.Queue()
    process = FORK.Process(target=lambda: results.put(measure()), daemon=True)
    process.start()
    peak = results.get(timeout=100)
    process.join()
    layer = 2 * sum(prod(shape) for name, shape in trained_layers().items() if name.endswith("0"))
    assert 0 < peak <= 2 * layer
    print(f"peak {peak / 1e6:.1f} MB, largest layer {layer / 1e6:.1f} MB")
