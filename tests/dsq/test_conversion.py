import copy
import pickle
import warnings
from functools import partial
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.testing._internal.two_tensor import TwoTensor

import dsq
from dsq.conversion import as_unconverted
from dsq.skipped import skipped_modules
from dsq.stash.controller import applied


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10, bias=False))
    net[3].weight = net[0].weight  # tied
    return net


def test_conversion_is_in_place_and_changes_only_classes():
    net, before = model(), model().state_dict()
    assert dsq.convert(net, dsq.DSQConfig(tied=True, stash="linears")) is net
    assert type(net[1]) is dsq.Linear
    assert type(net[3]) is dsq.Linear
    assert net[3].weight is net[0].weight
    assert net.state_dict().keys() == before.keys()
    assert all(torch.equal(net.state_dict()[name], before[name]) for name in before)
    assert list(dsq.converted(net)) == ["1", "3"]
    assert "precision=[8,4,8,8], format=BFP/SignedNVInt)" in repr(net)
    model().load_state_dict(net.state_dict())


def test_exclude_is_a_pattern_on_names():
    net = dsq.convert(model(), dsq.DSQConfig(exclude=r"^3$", tied=True, stash="linears"))
    assert list(dsq.converted(net)) == ["1"]
    with pytest.warns(UserWarning, match="exclude='lm_head' matches no layer"):
        assert list(
            dsq.converted(dsq.convert(model(), dsq.DSQConfig(exclude="lm_head", tied=True, stash="linears")))
        ) == ["1", "3"]


def test_a_layer_of_an_embeddings_weight_is_left_unless_asked(recwarn):
    net = dsq.convert(model(), stash="linears")
    assert list(dsq.converted(net)) == ["1"]
    assert not recwarn.list  # of few parameters converted: it was the default's choice
    report = dsq.report(net, torch.randint(10, (3,)))
    assert [(entry.name, entry.parameters) for entry in report.skipped] == [("3", 160)]
    assert "an embedding's too" in report.skipped[0].reason
    assert "give tied=True" in str(report)
    untied = model()
    untied[3].weight = nn.Parameter(untied[3].weight.detach().clone())
    assert list(dsq.converted(dsq.convert(untied, stash="linears"))) == ["1", "3"]


WARNINGS = [
    (nn.ReLU, {}, "no product to convert"),
    (lambda: nn.Conv2d(3, 3, 3), {}, r"no product to convert.*stash=\"all\" packs"),
    (lambda: nn.LSTM(64, 64), {"stash": "all"}, "LSTM: its products are inside of one operation"),
    (
        lambda: nn.ModuleList([nn.Linear(64, 64), nn.Conv1d(64, 64, 3)]),
        {},
        "only 25% of the parameters that are multiplied",
    ),
]


@pytest.mark.parametrize(("make", "options", "text"), WARNINGS)
def test_a_conversion_of_little_or_nothing_is_warned_of(make, options, text):
    with pytest.warns(UserWarning, match=text):
        dsq.convert(make(), **{"stash": "linears", **options})


SAVES = [("[-,4,-,-]", "all"), ("auto", "all")]
QUANTIZES = [("[8,4,8,8]", "all"), ("[8,4,8,8] [-,4,8,8]", "all"), ("[-,4,-,-]", "linears")]


@pytest.mark.parametrize(("levels", "stash"), SAVES + QUANTIZES)
def test_products_in_floating_point_are_warned_of_where_others_are_quantized(levels, stash):
    """What only packs has rules for a convolution, and none for an RNN."""
    config = dsq.DSQConfig(levels, stash=stash)
    of = {
        kind: [str(warning.message) for warning in caught]
        for kind in (nn.Conv1d(64, 64, 3), nn.GRU(64, 64))
        for caught in [warned(lambda kind=kind: dsq.convert(nn.ModuleList([nn.Linear(64, 64), kind]), config))]
    }
    conv, gru = of.values()
    if (levels, stash) in SAVES:
        assert not conv
        assert len(gru) == 1
        assert gru[0].startswith("86% of the parameters that are multiplied are of GRU, whose saved tensors stay exact")
    else:
        assert len(conv) == len(gru) == 1
        assert conv[0].startswith("only 25%")


def warned(function):
    with warnings.catch_warnings(record=True, action="always") as caught:
        function()
    return caught


def test_the_stash_of_a_model_without_products_follows_the_level():
    net, x = nn.Sequential(nn.Conv2d(3, 16, 3), nn.SiLU(), nn.Conv2d(16, 3, 3)), torch.randn(4, 3, 20, 20)
    plain = dsq.stash.measure(lambda: net(x)).nbytes
    with pytest.warns(UserWarning, match=r"no product to convert: only its saved tensors are packed"):
        dynamic = dsq.DynamicPrecision(net, "[4,4,4,8] [8,8,8,8]", rise_at=1)
    low = dsq.stash.measure(lambda: net(x)).nbytes
    saved = dynamic.state_dict()
    dynamic.record()
    high = dsq.stash.measure(lambda: net(x)).nbytes
    assert low < plain / 8 < high < plain / 5  # SiLU's input, in two bits more than q1, serves the convolution too
    assert dsq.report(net, x).gradient.grade == "fine"
    assert dsq.stash.measure(lambda: net(x)).nbytes == high  # the report put the level back
    dsq.DynamicPrecision(net, "[4,4,4,8] [8,8,8,8]", rise_at=1).load_state_dict(saved)
    assert dsq.stash.measure(lambda: net(x)).nbytes == low
    dsq.unconvert(net)
    assert dsq.stash.measure(lambda: net(x)).nbytes == plain
    with pytest.raises(ValueError, match="not converted"):
        dsq.unconvert(net)


@pytest.mark.parametrize("layer", [nn.Linear(32, 32), nn.Conv1d(32, 32, 1)], ids=["a linear layer", "no layer"])
@pytest.mark.filterwarnings("ignore:model has no product")
def test_a_copy_stashes_at_its_own_level(layer):
    config, x = dsq.DSQConfig(levels=("[4,4,4,8]", "[8,8,8,8]"), stash="all"), torch.randn(8, 32, 32)
    net = dsq.convert(nn.Sequential(nn.Sequential(layer, nn.Tanh()), nn.GELU()), config)
    twin = copy.deepcopy(net)
    saved = lambda model: dsq.stash.measure(lambda: model(x)).nbytes  # noqa: E731
    low = saved(net)
    dsq.set_level(twin, config, 1)
    high, of_part = saved(twin), saved(twin[0])
    assert saved(net) == low
    dsq.set_level(net, config, 1)
    assert saved(net) == high > low
    if isinstance(layer, nn.Linear):  # a part finds its level in its layers
        assert saved(net[0]) == of_part
    dsq.unconvert(net)
    assert saved(twin) == high


def test_weights_of_another_quantization_stay_and_multiply_by_themselves():
    def other(layer):  # a tensor made of others, as torchao's int8
        layer.weight = nn.Parameter(TwoTensor(layer.weight.detach(), layer.weight.detach()))

    net, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(4, 16)
    other(net[0])
    dsq.DynamicPrecision(net)
    assert list(dsq.converted(net)) == ["1"]
    assert [entry.reason for entry in skipped_modules(net)] == ["its weight is of another quantization"]
    other(net[1])
    y = net(x)
    assert torch.equal(y.a, dsq.unconvert(net)(x).a)


def test_a_lazy_layer_is_left():
    net = dsq.convert(nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 8)), dsq.DSQConfig(stash="all"))
    assert list(dsq.converted(net)) == ["2"]
    net(torch.randn(24, 16)).sum().backward()
    assert type(net[0]) is nn.Linear


def test_on_meta_a_model_runs_and_trains_once_it_has_memory():
    with torch.device("meta"):
        net = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
    dsq.convert(net, dsq.DSQConfig(stash="all"))
    assert net(torch.empty(64, 32, device="meta")).shape == (64, 8)
    net.to_empty(device="cpu")
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    net(torch.randn(64, 32)).sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("stash", ["linears", "all"])
@pytest.mark.parametrize("first", ["parametrize", "convert"])
def test_a_parametrized_layer_is_converted_and_taken_back(first, stash):
    net, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(24, 16)
    convert = lambda: dsq.convert(net, dsq.DSQConfig(stash=stash))  # noqa: E731
    steps = [lambda: parametrize.register_parametrization(net[0], "weight", Twice()), convert]
    for step in steps if first == "parametrize" else reversed(steps):
        step()
    assert list(dsq.converted(net)) == ["0", "2"]
    assert not dsq.report(net, x).skipped
    weight = net[0].weight.detach().requires_grad_()
    expected = dsq.functional.linear(x, weight, net[0].bias, "[4,4,4,8]")
    net[0](x).sum().backward()
    assert torch.equal(net[0].parametrizations.weight.original.grad, 2 * torch.autograd.grad(expected.sum(), weight)[0])
    dsq.unconvert(net)
    assert torch.equal(net[0](x), nn.functional.linear(x, weight, net[0].bias))
    parametrize.remove_parametrizations(net[0], "weight")
    assert type(net[0]) is nn.Linear


def test_evaluation_runs_at_q0_and_stashes_nothing():
    net, full = (
        dsq.convert(nn.Linear(16, 16), "[4,4,4,16]", eval_full_precision=full_precision, stash="linears").eval()
        for full_precision in (False, True)
    )
    x = torch.randn(4, 16)
    with torch.no_grad():
        y = net(x)
    assert y.grad_fn is None
    quantized = [dsq.quantize(t, net.quantizers.q0) for t in (x, net.weight)]
    torch.testing.assert_close(y, nn.functional.linear(*quantized, net.bias.detach()))
    assert torch.equal(net(input=x), y)  # the name that nn.Linear gives it
    assert torch.equal(full(x), nn.functional.linear(x, full.weight, full.bias))


def test_a_model_whose_policy_forbids_the_whole_stash_stays_as_it_was():
    model = nn.Sequential(nn.Linear(32, 4))
    dsq.stash.apply(model, "mesa")
    with pytest.raises(ValueError, match="policy 'bfp' cannot share a model with 'mesa'"):
        dsq.convert(model, dsq.DSQConfig(stash="all"))
    assert type(model[0]) is nn.Linear
    assert list(dsq.converted(dsq.convert(model, stash="linears"))) == ["0"]


class Refusing(nn.Sequential):
    config = SimpleNamespace(_attn_implementation="eager")

    def set_attn_implementation(self, name):
        raise ValueError("no such attention")


@pytest.mark.parametrize("stash", ["linears", "all"])
def test_a_conversion_that_fails_changes_nothing(stash):
    model = Refusing(nn.TransformerEncoderLayer(32, 2, 64))
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="no such attention"):
        dsq.convert(model, attention=True, stash=stash)
    assert [type(module) for module in model.modules()] == before
    assert not [name for module in model.modules() for name in vars(module) if name.startswith("_dsq")]


def test_where_no_layer_is_converted_nothing_else_changes():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 1)
    with pytest.warns(UserWarning, match="nothing changes"):
        dsq.convert(encoder, exclude=".*", stash="linears")
    assert encoder.layers[0].activation_relu_or_gelu == 1
    assert encoder.use_nested_tensor


@pytest.mark.parametrize("stash", ["linears", "all"])
def test_a_wrapper_of_a_converted_model_is_left_as_it_was(stash):
    """Also the policy stays the same object: it knows what was compiled, and its latest forward."""
    net = dsq.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), stash=stash)
    wrapper, policies = nn.Sequential(net), dict(applied(net))
    with as_unconverted(wrapper):
        assert not dsq.converted(wrapper)
        assert not applied(net)
    assert applied(net) == policies
    assert not wrapper._forward_hooks
    assert not wrapper._forward_pre_hooks
    dsq.unconvert(net)
    assert not net._forward_hooks
    assert not net._forward_pre_hooks


def test_a_conversion_is_undone_and_redone_also_in_a_pickled_copy():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), 1).eval()
    changed = encoder.layers[0].activation_relu_or_gelu
    net = pickle.loads(pickle.dumps(dsq.convert(encoder, "[4,4,4,8]", stash="linears")))
    for _ in range(2):
        with as_unconverted(net):
            assert (net.layers[0].activation_relu_or_gelu, net.use_nested_tensor) == (changed, True)
            assert not dsq.converted(net)
        assert (net.layers[0].activation_relu_or_gelu, net.use_nested_tensor) == (0, False)
        assert len(dsq.converted(net)) == 4
    dsq.unconvert(net)
    assert (net.layers[0].activation_relu_or_gelu, net.use_nested_tensor) == (changed, True)
    assert not [name for module in net.modules() for name in vars(module) if name.startswith("_dsq")]


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x @ self.weight


def hook_forward(module):
    """Wrap the forward as accelerate's hooks do: it is looked up at each call."""
    module._old_forward = module.forward
    module.forward = partial(lambda module, x: module._old_forward(x), module)


def prepare_forward(module):
    """Wrap the function of the forward as accelerate's prepare does."""
    module.forward = MethodType(torch.autocast("cpu", enabled=False)(module.forward.__func__), module)


@pytest.mark.parametrize("wrap", [hook_forward, prepare_forward])
@pytest.mark.parametrize("kind", [lambda: nn.Linear(8, 8), Weight])
@pytest.mark.filterwarnings("ignore:model has no product")
def test_a_forward_of_the_instance_is_converted_and_unconverted_or_skipped(wrap, kind):
    x, model = torch.randn(4, 8), kind()
    y = model(x)
    dsq.convert(model, "[2,2,2,2]")
    wrap(model)
    assert not torch.allclose(model(x), y)
    assert not dsq.report(model, x).skipped
    assert torch.equal(dsq.unconvert(model)(x), y)
    model = kind()
    y = model(x)
    wrap(model)
    dsq.convert(model, "[2,2,2,2]")
    skipped = [entry.reason for entry in dsq.report(model, x).skipped]
    assert torch.allclose(model(x), y) == bool(skipped) == (wrap is prepare_forward)
    assert all("convert the model before" in reason for reason in skipped)
