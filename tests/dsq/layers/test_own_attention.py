"""Modules that call F.scaled_dot_product_attention: its products are quantised, and nothing else changes."""

import copy
import pickle

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
