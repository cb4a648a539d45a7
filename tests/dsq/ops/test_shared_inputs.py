"""Layers that read one input share its codes for the length of a forward, and never those of an earlier one."""

import copy
import pickle
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import dsq
from tests.dsq.gradients import saving

LEVELS = "[16,16,16,16]"
CODES = 64 * 32 * 4.5 / 8 + 1  #: bytes of an input of 64 x 32 in 4 bits, and of the exponent of all its scales


class Attention(nn.Module):
    """Three layers that read one input; ``between`` is called after each."""

    def __init__(self, between=lambda x: None):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 16, bias=False) for _ in range(3))
        self.between = between

    def forward(self, x):
        y = self.q(x)
        for layer in (self.k, self.v):
            self.between(x)
            y = y + layer(x)
        return y


def converted(model, **options):
    return dsq.convert(model, **{"levels": "[4,4,4,8]", "stash": "linears"} | options)


def code_bytes(run):
    """Bytes of codes that tensors of ``run()`` save, each memory once."""
    _, tensors = saving(run)
    return sum({t.data_ptr(): t.nbytes for t in tensors if t.dtype == torch.uint8}.values())


CALLS = {
    "the model": lambda model, x: model(x),
    "a part alone": lambda model, x: model[1](x),
    "a copy": lambda model, x: copy.deepcopy(model)(x),
    "pickled": lambda model, x: pickle.loads(pickle.dumps(model))(x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_layers_of_a_converted_model_keep_one_code_of_what_they_all_read(call):
    model = converted(nn.Sequential(nn.Identity(), Attention(print)))
    assert code_bytes(partial(call, model, torch.randn(64, 32, requires_grad=True))) == CODES
    dsq.report(model, torch.randn(64, 32))  # which runs it as it was
    assert code_bytes(partial(call, model, torch.randn(64, 32))) == CODES
    dsq.unconvert(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._forward_hooks_always_called for m in model.modules())


@pytest.mark.parametrize("stash", ["linears", "all"])
@pytest.mark.parametrize("layout", [lambda x: x.transpose(0, 1), lambda x: x], ids=["transposed", "contiguous"])
def test_layers_share_codes_of_any_layout_under_each_stash(stash, layout):
    model = converted(Attention(), stash=stash)
    assert code_bytes(lambda: model(layout(torch.randn(8, 8, 32, requires_grad=True)))) == CODES


def test_layers_share_codes_of_views_with_the_same_rows():
    model, x = converted(nn.ModuleList([Attention()])), torch.randn(8, 8, 32)
    attention = model[0]
    attention.forward = lambda x: attention.q(x).sum() + attention.k(x.flatten(0, 1)).sum()
    assert code_bytes(lambda: attention(x)) == CODES


def test_layers_outside_of_a_forward_share_nothing():
    model, x = converted(Attention()), torch.randn(64, 32)
    assert code_bytes(lambda: model.q(x) + model.k(x) + model.v(x)) == 3 * CODES


@pytest.mark.parametrize("segment", [Attention.forward, Attention.__call__], ids=["a function", "a module"])
def test_what_a_checkpoint_recomputes_shares_too(segment):
    model, seen = converted(Attention()), []

    def run(x):
        seen.append(code_bytes(lambda: segment(model, x.clone())))
        return segment(model, x)

    checkpoint(run, torch.randn(64, 32, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen[1:] == [CODES]


def test_codes_go_with_their_graph_while_the_forward_runs():
    codes = []

    def offload(tensor):
        codes.append(StorageWeakRef(tensor.untyped_storage()))
        return None

    def check(x):
        assert codes
        assert all(ref.expired() for ref in codes)

    with torch.autograd.graph.saved_tensors_hooks(offload, lambda _: None):
        converted(Attention(check))(torch.randn(64, 32))


def rewritten(x):
    x.mul_(-1)


def elsewhere(x):
    x.data = torch.randn(64, 32)


@pytest.mark.parametrize("change", [rewritten, elsewhere])
def test_an_input_that_changes_within_the_forward_is_packed_anew(change):
    model, x = converted(Attention(change), levels=LEVELS), torch.randn(64, 32)
    y = model(x)
    dw = torch.autograd.grad(y.sum(), model.v.weight)[0]
    torch.testing.assert_close(dw[0], x.sum(0), rtol=1e-3, atol=1e-3)


def refilled(x):
    x.numpy()[:] = np.random.default_rng(x.numel()).standard_normal(x.shape)


def at_a_used_address(x):
    x.data = torch.empty(0)
    x.data = torch.randn(64, 32)


@pytest.mark.parametrize("stash", ["linears", "all"])
@pytest.mark.parametrize("change", [refilled, at_a_used_address])
@pytest.mark.parametrize("wrap", [lambda net: net, lambda net: net.q], ids=["a model", "a layer"])
def test_a_buffer_filled_past_the_version_counter_is_packed_anew_though_an_earlier_graph_lives(wrap, change, stash):
    net = converted(Attention(), levels=LEVELS, stash=stash)
    model, x, alive = wrap(net), torch.randn(64, 32), []
    for _ in range(3):
        alive += [model(x), model(x)]
        change(x)
        y = model(x)
        dw = torch.autograd.grad(y.sum(), net.q.weight, retain_graph=True)[0]
        torch.testing.assert_close(dw[0], x.sum(0), rtol=1e-3, atol=1e-3)


def test_a_stochastic_code_serves_no_layer_that_rounds_to_nearest():
    def dw_of_k(stochastic):
        model = converted(Attention(), levels="[16,4,16,16]")
        model.q.quantizers = replace(model.q.quantizers, rounding="stochastic" if stochastic else "nearest")
        torch.manual_seed(0)
        return torch.autograd.grad(model(torch.randn(64, 32)).sum(), model.k.weight)[0]

    torch.manual_seed(0)
    assert torch.equal(dw_of_k(True), dw_of_k(False))


def test_a_forward_that_breaks_off_ends():
    model, x = converted(Attention(lambda x: 1 / 0)), torch.randn(64, 32)
    with pytest.raises(ZeroDivisionError):
        model(x)
    assert code_bytes(lambda: model.q(x) + model.k(x)) == 2 * CODES


def test_an_interrupted_forward_ends_with_the_next_backward():
    def interrupt(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # after which PyTorch runs no hook
        converted(Attention(interrupt))(torch.randn(64, 32))
    net, x, alive = converted(Attention(), levels=LEVELS), torch.randn(64, 32), []
    for _ in range(3):
        y = net(x)
        dw = torch.autograd.grad(y.sum(), net.q.weight, retain_graph=True)[0]
        torch.testing.assert_close(dw[0], x.sum(0), rtol=1e-3, atol=1e-3)
        alive.append(y)
        refilled(x.mul_(1))
