"""Modules that multiply in their own forward: those products are quantised, and nothing else changes."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dsq
from analysis.coverage import shares
from dsq.ops.products import attention, product

CONFIG = dsq.DSQConfig(levels="[4,4,4,16]", attention=True)


class Own(nn.Module):
    """Attention as a plain loop's model writes it."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True).transpose(1, 2).flatten(2)


class Around(nn.Sequential):
    """A module that calls no attention itself."""


def made(config=CONFIG):
    torch.manual_seed(0)
    return dsq.convert(Around(Own()), config)


X = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(1))


def test_the_products_are_those_of_quantised_attention():
    net = made()
    q, k, v = (t.view(2, 24, 2, 16).transpose(1, 2) for t in net[0].qkv(X).chunk(3, -1))
    expected, _ = attention(q, k, v, CONFIG.at(0).products, is_causal=True)
    assert torch.equal(net(X), expected.transpose(1, 2).flatten(2))
    assert dsq.report(net, X).forward.share == 1
    assert dsq.report(net, X).backward.share == 1


def test_it_is_off_where_it_is_not_asked_for_or_evaluates_plain():
    assert type(made(dsq.DSQConfig(levels="[4,4,4,16]"))[0]) is Own
    plain, net = (
        Around(Own()).eval(),
        made(dsq.DSQConfig(levels="[4,4,4,16]", attention=True, eval_full_precision=True)),
    )
    plain.load_state_dict(net.state_dict())
    assert torch.equal(net.eval()(X), plain(X))


def test_it_comes_back_and_is_copied_and_pickled():
    net = made()
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(X), net(X))
    dsq.unconvert(net)
    assert type(net[0]) is Own


def test_compiled_in_one_graph():
    net = made()
    torch._dynamo.reset()
    found = torch.compile(net, backend="aot_eager", fullgraph=True)(X)
    torch.testing.assert_close(found, net(X), rtol=1e-3, atol=1e-3)


class LikeFairseq(nn.Module):
    """Attention's products by torch.bmm, as fairseq writes them, beside the attribute that tells its attention."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.skip_embed_dim_check = nn.Linear(32, 32), True

    def forward(self, x):
        weights = torch.bmm(self.q_proj(x), x.transpose(1, 2)).softmax(-1)
        return torch.bmm(weights, x)


def test_the_products_of_fairseqs_attention():
    net = dsq.convert(LikeFairseq(), CONFIG)
    products = CONFIG.at(0).products
    weights = product(net.q_proj(X), X.mT, products).softmax(-1)
    assert torch.equal(net(X), product(weights, X, products))
    assert dsq.report(net, X).forward.share == 1
    assert type(dsq.unconvert(net)) is LikeFairseq


def test_fairseqs_own_model_is_quantised_whole():
    pytest.importorskip("fairseq_plugin.shims", reason="fairseq is not installed")
    for asked, share in ((False, 0.9), (True, 1)):
        found = shares("fairseq", attention=asked, tied=True)
        assert found["forward"] == pytest.approx(share, abs=0.02)
        assert found["uncalled"] == 0


class Weights(nn.Module):
    """Holds two parameters, for products written in several ways."""

    def __init__(self, *shapes, forward):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(shape) / 8) for shape in shapes)
        self.written = forward

    def forward(self, x):
        return self.written(self, x)


def with_linear(self, x):
    return F.linear(x, self.a, bias=torch.ones(64)) @ self.b


def from_the_left(self, x):
    return (self.a @ x.mT).mT.matmul(self.b)


def with_einsum(self, x):
    return torch.einsum("bthe,hed->btd", torch.einsum("btd,dhe->bthe", x, self.a), self.b)


def with_bmm(self, x):
    return torch.bmm(torch.bmm(x, self.a), self.b)


def in_a_loop(self, x):
    return sum(F.gelu(x @ a) @ b for a, b in zip(self.a, self.b.unbind(), strict=True))


def grouped(self, x):
    rows = torch.tensor([40, 96], dtype=torch.int32)
    y = F.grouped_mm(F.grouped_mm(x.flatten(0, 1), self.a, offs=rows), self.b, offs=rows)
    return y.mul(2)  # in the backward of grouped_mm PyTorch takes no expanded gradient


FORWARDS = [
    (with_linear, (64, 32), (64, 32)),
    (from_the_left, (64, 32), (64, 32)),
    (with_einsum, (32, 4, 16), (4, 16, 32)),
    (with_bmm, (2, 32, 64), (2, 64, 32)),
    (in_a_loop, (2, 32, 64), (2, 64, 32)),
    (grouped, (2, 32, 64), (2, 64, 32)),
]
named = pytest.mark.parametrize("made", FORWARDS, ids=[made[0].__name__ for made in FORWARDS])


class Written(Weights):
    """The class whose code has the products: functions of a module are not looked into."""

    def names(self):
        return torch.bmm, torch.einsum, F.linear, F.grouped_mm, self @ self


def written(made):
    return Written(*made[1:], forward=made[0])


def gradients(net, x):
    y = net(x)
    return [y, *torch.autograd.grad(y.square().sum(), (x, *net.parameters()))]


IMAGE = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(3)).requires_grad_()


@named
def test_products_with_own_parameters_are_quantised_whole_and_at_full_width_what_they_were(made):
    net, plain = written(made), written(made)
    dsq.convert(net, dsq.DSQConfig(levels="[32,32,32,32]"))
    for found, expected in zip(gradients(net, IMAGE), gradients(plain, IMAGE), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    dsq.unconvert(net)
    assert type(net) is Written
    assert net.state_dict().keys() == plain.state_dict().keys()
    dsq.convert(net, dsq.DSQConfig(levels="[4,4,4,16]"))
    found = dsq.report(net, IMAGE)
    assert (found.forward.share, found.backward.share, found.left) == (1, 1, ())


def test_they_are_linear_layers_of_the_same_bits_with_a_packed_stash():
    config = dsq.DSQConfig(levels="[4,4,4,16]")
    net = dsq.convert(written(FORWARDS[0]), config)
    y = dsq.functional.linear(IMAGE, net.a, torch.ones(64), config.at(0))
    y = dsq.functional.linear(y, net.b.t(), None, config.at(0))
    assert torch.equal(net(IMAGE), y)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        net(IMAGE)
    assert sum(t.nbytes for t in kept if t.dtype == torch.uint8) == 96 * (32 + 64) * 4.5 / 8 + 2


@named
def test_they_are_compiled_copied_and_trained_with_the_whole_stash(made):
    if made[0] is grouped:
        pytest.skip("the counts of rows break the graph")
    net = dsq.convert(written(made), dsq.DSQConfig(levels="[4,4,4,16]"))
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for found, expected in zip(gradients(compiled, IMAGE), gradients(net, IMAGE), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    twin = copy.deepcopy(net)
    assert torch.equal(twin(IMAGE), net(IMAGE))
    whole = dsq.convert(dsq.unconvert(twin), dsq.DSQConfig(levels="[4,4,4,16]", stash="all"))
    assert torch.equal(whole(IMAGE), net(IMAGE))


def test_few_rows_to_a_matrix_are_multiplied_plain():
    net, x = dsq.convert(written(FORWARDS[3]), dsq.DSQConfig(levels="[4,4,4,16]")), torch.randn(2, 8, 32)
    quantised = net(x)
    assert torch.equal(quantised, dsq.unconvert(net)(x))


class Scaled(nn.Module):
    """Matrices of its own that it does not multiply by, beside a layer that it does."""

    def __init__(self):
        super().__init__()
        self.places, self.linear = nn.Parameter(torch.randn(24, 32)), nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(x + self.places)


def test_after_a_forward_without_own_products_no_mode_is_entered():
    net = dsq.convert(Scaled(), dsq.DSQConfig(levels="[4,4,4,16]"))
    first = net(X)
    assert net.idle
    assert torch.equal(net(X), first)
    assert "idle" not in dsq.unconvert(net).__dict__


class Router(nn.Module):
    top_k = 1

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32))

    def forward(self, x):
        return F.linear(x, self.weight)


def test_routers_and_weights_of_other_types_are_left():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not dsq.converted(dsq.convert(Router()))


class Subclass(nn.Linear):
    """A layer as in timm: it casts, and calls the function."""

    def forward(self, x):
        return F.linear(x.float(), self.weight, self.bias)


def test_a_subclass_of_a_layer_is_quantised_by_its_call():
    torch.manual_seed(0)
    net = dsq.convert(Subclass(32, 16), dsq.DSQConfig(levels="[4,4,4,16]"))
    assert torch.equal(net(X), dsq.functional.linear(X, net.weight, net.bias, "[4,4,4,16]"))
    assert type(dsq.unconvert(net)) is Subclass
