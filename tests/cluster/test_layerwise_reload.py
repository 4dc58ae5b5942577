"""The layer-wise reload of an engine: what is not sent stays, and a worker collects its shard alone."""

from types import SimpleNamespace

import pytest
import torch
from rlhf_stack.sync import SyncError

# It imports vLLM into the process of all tests of the suite, which ended with SIGSEGV after them.
pytestmark = [pytest.mark.carries("openrlhf==0.11.2"), pytest.mark.integration]

EXPERTS, WIDTH, HIDDEN = 4, 6, 5  # of which this worker holds two experts
OWN = {1: 0, 3: 1}


def default(param, weight):
    param.data.copy_(weight)


def half(param, weight, part):
    """A part of a fused parameter, of which this worker holds the second half."""
    rows = len(param) // 2
    param.data[part * rows :][:rows].copy_(weight.chunk(2)[1])


def padded(param, weight):
    param[: len(weight)].data.copy_(weight)
    param[len(weight) :].data.fill_(0)


def scaled(param, weight):
    param.data.copy_(weight)
    param.data.copy_(-torch.exp(param))


def of_expert(param, weight, expert):
    if expert in OWN:
        param.data[OWN[expert]].copy_(weight)


class Layer(torch.nn.Module):
    """A layer with parameters (shape, loader)."""

    def __init__(self, **parameters):
        super().__init__()
        for name, (shape, loader) in parameters.items():
            parameter = torch.nn.Parameter(torch.randn(shape), requires_grad=False)
            parameter.weight_loader = loader
            setattr(self, name, parameter)


class Model(torch.nn.Module):
    """A model that is loaded as vLLM's are; ``method`` rearranges the experts' weights after loading."""

    def __init__(self, method=None):
        super().__init__()
        self.norm = Layer(weight=((HIDDEN,), default), frozen=((HIDDEN,), default))
        self.fused = Layer(weight=((8, HIDDEN), half))
        self.embed = Layer(weight=((10, HIDDEN), padded))
        self.state = Layer(a=((3,), scaled), d=((3,), default))
        self.experts = Layer(
            up=((len(OWN), WIDTH, HIDDEN), of_expert), down=((len(OWN), HIDDEN, WIDTH), of_expert)
        )
        self.router = Layer(weight=((EXPERTS, HIDDEN), default))
        self.vision = Layer(weight=((3,), default))
        self.direct = Layer(up=((4, HIDDEN), default), sinks=((3,), default))
        self.experts.quant_method = method

    def load_weights(self, weights):
        parameters = dict(self.named_parameters())
        for sent, weight in weights:
            name, *part = sent.split("/")
            parameter = parameters[name]
            if name.startswith("direct"):  # as gpt-oss does, without the parameter's loader
                turned = weight.transpose(0, -1)
                parameter.data[:3].copy_(turned[:3].contiguous())
                parameter[3:].copy_(turned[3:])
                continue
            parameter.weight_loader(parameter, weight, *map(int, part))


SENT = {
    "norm.weight": (HIDDEN,),
    "fused.weight/0": (8, HIDDEN),
    "fused.weight/1": (8, HIDDEN),
    "embed.weight": (7, HIDDEN),
    "state.a": (3,),
    "state.d": (3,),
    "router.weight": (EXPERTS, HIDDEN),
    "direct.up": (HIDDEN, 4),
    "direct.sinks": (3,),
    **{f"experts.up/{index}": (WIDTH, HIDDEN) for index in range(EXPERTS)},
    **{f"experts.down/{index}": (HIDDEN, WIDTH) for index in range(EXPERTS)},
}


@pytest.fixture
def reload(monkeypatch):
    """Return a function that reloads a model with weights, bucket by bucket; it returns what was written."""
    from rlhf_stack.engine import layerwise_reload
    from vllm.model_executor.model_loader.reload import layerwise, meta

    empty = torch.empty_strided
    monkeypatch.setattr(meta.torch, "empty_strided", lambda *a, **k: empty(*a, **k).fill_(float("nan")))

    def run(model, buckets, rearranged=(), between=lambda _: None):
        one = layerwise_reload.LayerwiseReload(model, rearranged)
        try:
            for bucket in buckets:
                memory = {name: each.clone() for name, each in bucket.items()}
                one.load(list(memory.items()))
                for each in memory.values():
                    each.fill_(float("nan"))  # the next bucket takes its place
                between([entry for *_, info in one._layers for _, entry in info.loaded_weights])
            return one.finish(SimpleNamespace(dtype=torch.float32))
        except SyncError:
            one.abort(SimpleNamespace(dtype=torch.float32))
            raise

    run.record = layerwise.record_metadata_for_reloading
    run.Elements = layerwise_reload.Elements
    return run


def drawn(seed, names=SENT):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SENT[name], generator=generator) for name in names}


def expected(before, sent):
    model = Model()
    model.load_state_dict(before)
    model.load_weights(sent.items())
    return model.state_dict()


def state(model):
    return {name: each.clone() for name, each in model.state_dict().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "left_out",
    [
        [],
        ["norm.weight"],
        ["fused.weight/1"],
        ["state.d"],
        ["state.a"],
        ["experts.up/1"],
        ["experts.down/1", "experts.down/3"],
        ["embed.weight", "router.weight"],
        ["direct.sinks"],
        ["direct.up", "direct.sinks"],
    ],
)
def test_what_is_not_sent_keeps_its_value(reload, left_out):
    """Also after a second sync, and in each order of the weights."""
    model = Model()
    reload.record(model)
    pointers = {name: each.data_ptr() for name, each in model.named_parameters()}
    names = [name for name in SENT if name not in left_out]
    for seed, order in ((1, names), (2, names[::-1]), (3, names[::2] + names[1::2])):
        before, sent = state(model), drawn(seed, order)
        reload(model, [{name: sent[name]} for name in order])
        assert same(model.state_dict(), expected(before, sent))
    assert pointers == {name: each.data_ptr() for name, each in model.named_parameters()}, "CUDA graphs"


def test_the_tensors_that_were_written_are_known(reload):
    model = Model()
    reload.record(model)
    names = [name for name in SENT if name not in ("router.weight", "state.d")]
    written = reload(model, [drawn(0, names)])
    assert {name for name, _ in model.named_parameters()} - written == {
        "norm.frozen",
        "vision.weight",
        "router.weight",
        "state.d",
    }


def test_a_layer_that_the_model_writes_itself_is_loaded_once_it_is_complete(reload):
    remaining = []
    model = Model()
    reload.record(model)
    names = ["direct.up", "direct.sinks"]
    sent = drawn(1, names)
    written = reload(
        model, [{name: sent[name]} for name in names], between=lambda entries: remaining.append(len(entries))
    )
    assert remaining == [2, 0]
    assert written == set(names)


def test_a_write_without_a_loader_that_is_no_copy_is_refused(reload):
    class Adding(Model):
        def load_weights(self, weights):
            for name, weight in weights:
                self.get_parameter(name).data.add_(weight)

    model = Adding()
    reload.record(model)
    before = state(model)
    with pytest.raises(SyncError, match=r"loader of Adding writes state\.d with aten\.add_"):
        reload(model, [drawn(1, ["state.d"])])
    assert same(model.state_dict(), before)


def test_of_a_layer_that_is_not_complete_the_elements_of_the_shard_are_kept(reload):
    kept = {}

    def between(entries):
        for entry in entries:
            assert isinstance(entry, reload.Elements)
        elements = [each for entry in entries for _, each in entry.copies]
        kept["most"] = max(kept.get("most", 0), sum(each.untyped_storage().nbytes() for each in elements))

    model = Model()
    reload.record(model)
    names = [name for name in SENT if name.startswith("experts")]
    before, sent = state(model), drawn(1, names)
    reload(model, [{name: sent[name]} for name in names], between=between)
    assert same(model.state_dict(), expected(before, sent))
    own = 4 * len(OWN) * 2 * WIDTH * HIDDEN
    assert kept["most"] == own - 4 * WIDTH * HIDDEN, "all but the last one, with which the layer is loaded"


def test_a_loader_that_computes_gets_a_copy_of_the_whole_weight(reload):
    def between(entries):
        assert not any(isinstance(entry, reload.Elements) for entry in entries)

    model = Model()
    reload.record(model)
    before, sent = state(model), drawn(1, ["state.a", "state.d"])
    reload(model, [{"state.a": sent["state.a"]}, {"state.d": sent["state.d"]}], between=between)
    assert same(model.state_dict(), expected(before, sent))


def rearranging():
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Method(QuantizeMethodBase):
        def create_weights(self, layer, *_, **__):
            """Not called."""

        def apply(self, layer, *_, **__):
            """Not called."""

        def process_weights_after_loading(self, layer):
            layer.up.data.copy_(layer.up.flip(1))

    return Method()


def processed(before, sent):
    after = expected(before, sent)
    return after | {"experts.up": after["experts.up"].flip(1)} if "experts.up/1" in sent else after


@pytest.mark.parametrize(
    ("left_out", "refused"),
    [
        ([], ""),
        (["experts.up/0", "experts.down/2"], ""),  # of other workers
        ([name for name in SENT if name.startswith("experts")], ""),
        (["experts.up/3"], "experts.up"),
        (["experts.down/1", "experts.down/3"], "experts.down"),
    ],
)
def test_a_rearranged_layer_must_be_sent_whole_or_not(reload, left_out, refused):
    model = Model(rearranging())
    reload.record(model)
    model.experts.quant_method.process_weights_after_loading(model.experts)
    rearranged = {"experts.up", "experts.down"}
    before = state(model)
    sent = drawn(1, [name for name in SENT if name not in left_out])
    buckets = [{name: each} for name, each in sent.items()]
    if refused:
        with pytest.raises(SyncError, match=rf"{refused} is not sent, or a part of it"):
            reload(model, buckets, rearranged)
        assert same({name: before[name] for name in rearranged}, model.state_dict())
    else:
        reload(model, buckets, rearranged)
        assert same(model.state_dict(), processed(before, sent))
    before, sent = state(model), drawn(2)
    reload(model, [sent], rearranged)
    assert same(model.state_dict(), processed(before, sent)), "the next sync can begin"
