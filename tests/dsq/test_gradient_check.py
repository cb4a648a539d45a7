"""The gradient that trains, held against the unquantized one."""

import copy
import json
import math
import random
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dsq
from dsq.gradient_check import compare
from tests.dsq.stash.every_policy import NAMES, small, train


def blocks(dropout=0.1):
    layers = [nn.TransformerEncoderLayer(32, 2, 64, dropout, batch_first=True) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(32, 32))


def exact(dropout=0.1):
    return dsq.convert(blocks(dropout), dsq.DSQConfig("[32,32,32,32]", stash="linears"))


def loss_of(net, x):
    return lambda: F.cross_entropy(net(x).flatten(0, 1), torch.arange(96) % 32)


X = torch.randn(4, 24, 32, generator=torch.Generator().manual_seed(0))


def compiled(dropout):
    net = exact(dropout)
    net[0].compile(backend="aot_eager")
    return net


@pytest.mark.parametrize("make", [blocks, exact, compiled])
def test_an_exact_model_has_its_own_gradient_at_the_same_dropout(make):
    net = make(dropout=0.3)
    check = compare(net, loss_of(net, X))
    assert (check.error, check.of_stash, check.grade) == (0, 0, "fine")
    assert check.cosine == pytest.approx(1, abs=1e-12)
    assert {p.name for p in check.parameters} == {name for name, _ in net.named_parameters()}


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_eight_bits_are_fine_and_two_are_not(rounding):
    """Seeds of stochastic rounding are drawn from the stream that dropout is."""
    grades = {}
    for levels in ("[8,8,8,8]", "[2,2,2,2]"):
        torch.manual_seed(0)
        net = dsq.convert(blocks(), dsq.DSQConfig(levels, rounding=rounding, stash="linears"))
        check = compare(net, loss_of(net, X))
        grades[levels] = check.grade
        assert 0 < check.of_stash < check.error
        errors = [p.error for p in check.parameters if p.judged]
        assert errors == sorted(errors, reverse=True)
    assert grades == {"[8,8,8,8]": "fine", "[2,2,2,2]": "broken"}


@pytest.mark.parametrize("policy", NAMES)
def test_policies_are_suspended_and_go_on_as_if_nothing_had_been(policy):
    def losses(check):
        net = small(0.2)
        dsq.stash.apply(net, policy)
        before = train(net, steps=2)
        if check:
            results.append(compare(net, loss_of(net, X)))
        return before + train(net, steps=2)

    results = []
    assert losses(check=True) == losses(check=False)
    exact = policy in ("selective", "checkpoint")
    assert results[0].error == results[0].of_stash
    assert (results[0].error < 1e-6) == exact


def test_nothing_of_the_training_changes():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm, self.frozen = nn.Linear(32, 32), nn.BatchNorm1d(24), nn.Linear(32, 32)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return F.dropout(self.norm(self.frozen(self.linear(x))))

    net = dsq.convert(Net(), dsq.DSQConfig("[8,4,4,8]", stash="all"))
    net.linear.weight.grad = gradient = torch.ones(32, 32)
    fired = []
    net.linear.bias.register_post_accumulate_grad_hook(fired.append)  # as an optimizer within the backward
    quantizers, policies = net.linear.quantizers, dict(dsq.stash.controller.applied(net))
    hooks = list(net._forward_pre_hooks), list(net._forward_hooks)
    state, random = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    check = compare(net, loss_of(net, X))
    assert {p.name for p in check.parameters} == {"linear.weight", "linear.bias", "norm.weight", "norm.bias"}
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert net.linear.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(32, 32))
    assert net.linear.bias.grad is None
    assert not fired
    assert (net.linear.quantizers, dsq.stash.controller.applied(net)) == (quantizers, policies)
    assert (list(net._forward_pre_hooks), list(net._forward_hooks)) == hooks
    loss_of(net, X)().backward()
    assert len(fired) == 1


def hooked(change):
    """What makes of a parameter the same values, of which ``change`` changes the gradient."""

    def of(parameter):
        y = parameter.clone()
        y.register_hook(change)
        return y

    return of


class Changed(nn.Module):
    """The gradient of the first of two parameters is changed while the layer is quantized."""

    def __init__(self, change, scale=1.0):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(512)), nn.Parameter(torch.randn(512))
        self.layer = nn.Linear(512, 512)
        self.change, self.scale = change, scale
        dsq.convert(self, dsq.DSQConfig("[16,16,16,16]", stash="linears"))

    def forward(self, x):
        first = self.change(self.first) if self.layer.quantizers.q0.packs else self.first
        return self.layer(x * (self.scale * first + self.second))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (hooked(lambda dy: dy * 20_000), "broken.*error over 0.8: raise q0 and q2; first: error 2e"),
        (hooked(lambda dy: dy * 0.02), r"broken.*first: error 0\.98, cosine 1, norm x 0\.02"),
        (hooked(lambda dy: dy.flip(0)), "broken.*first: error .*cosine"),
        (hooked(torch.zeros_like), "broken.*first: error 1, cosine 0, norm x 0"),
        (torch.Tensor.detach, "broken.*first: error 1, cosine 0"),
        (hooked(lambda dy: dy * math.nan), "broken: .*worst cosine nan; the gradient of first is not finite$"),
        (hooked(lambda dy: dy * 3.5), r"doubtful.*first: error 2\.5, cosine 1, norm x 3\.5"),
        (hooked(lambda dy: dy * 1.1), "fine"),
    ],
)
def test_a_gradient_that_is_wrong_is_condemned(change, words):
    net, x = Changed(change, scale=0.2), torch.randn(64, 512)
    check = compare(net, lambda: net(x).square().sum())
    assert check.parameters[0].name == "first"
    assert re.search(words, check.verdict)
    assert "\n" not in check.verdict


def test_a_gradient_that_is_not_finite_anyway_and_a_loss_of_other_data_at_each_call_are_named():
    net = nn.Linear(8, 1)
    check = compare(net, lambda: (net(torch.ones(2, 8)) * math.inf).sum())
    assert check.verdict.endswith("is not finite without quantization either")
    net = dsq.convert(blocks(), dsq.DSQConfig("[8,8,8,8]", stash="linears"))
    batches = iter(torch.randn(8, 4, 24, 32))
    check = compare(net, lambda: loss_of(net, next(batches))())
    assert re.search(r"^gradient \w+: .*; loss\(\) itself moves it by \S+: let it run the same batch", check.verdict)


def test_a_gradient_that_bfloat16_would_move_as_far_is_told_apart():
    """As of a deep network with initial weights: there the gradient is no sign of what training loses."""
    net = dsq.convert(nn.Linear(32, 8), dsq.DSQConfig("[8,8,8,8]", stash="linears"))
    net.packed = nn.Parameter(torch.tensor([2**24 + 1], dtype=torch.int32), requires_grad=False)  # no weights
    before, seen = net.weight.clone(), []
    loss = (net(X).requires_grad_() @ net.weight).sum()

    def loss_of_sines():
        seen.append(net.packed.item())
        return (net(X) * 1000).sin().sum()

    check = compare(net, loss_of_sines)
    loss.backward()  # of before
    assert seen == [2**24 + 1] * 5
    assert re.search("^gradient broken: .*; weights rounded to bfloat16 move it by .*: check again", check.verdict)
    assert torch.equal(net.weight, before)


def test_random_numbers_of_numpy_and_python_are_the_same_in_all_runs():
    """transformers draws the masks of wav2vec2 and HuBERT from NumPy."""
    net = exact()
    before = random.getstate(), np.random.get_state()[1].tolist()
    check = compare(net, lambda: loss_of(net, X * torch.tensor(np.random.rand(24, 1)).float() * random.random())())
    assert (check.error, check.of_loss) == (0, 0)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_parameters_whose_gradient_is_rounding_noise_are_not_judged():
    """The bias of attention's keys moves no score after the softmax: its gradient is zero, in exact arithmetic."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
            self.unused = nn.Parameter(torch.ones(3))
            self.zero = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)) + 0 * self.zero.sum()

    net = Attention()
    for levels in ("[8,8,8,8]", "[8,4,4,8]"):
        model = dsq.convert(copy.deepcopy(net), dsq.DSQConfig(levels, stash="all"))
        check = compare(model, loss_of(model, 3 * X))
        by_name = {p.name: p for p in check.parameters}
        assert by_name["k.bias"].share < 1e-6
        assert by_name["k.bias"].error > 1
        assert not by_name["k.bias"].judged
        assert check.cosine > 0.9
        assert (by_name["zero"].cosine, by_name["zero"].ratio, by_name["zero"].error) == (1, 1, 0)
        assert "unused" not in by_name


def test_parameters_of_few_values_are_not_judged():
    """The gradient of a last bias is the sum of the residuals, near 0 by chance in some batches."""
    torch.manual_seed(1)
    net, x = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(256, 32)
    y = net(x).detach() + torch.randn(256, 1)
    y -= (y - net(x).detach()).mean() - 1e-4
    dsq.convert(net, dsq.DSQConfig(stash="linears"))
    check = compare(net, lambda: F.mse_loss(net(x), y))
    assert check.of_stash > 0.06  # a gradient that is noise, as in every model that has trained
    last = next(p for p in check.parameters if p.name == "2.bias")
    assert (last.values, last.judged, check.grade) == (1, False, "fine")
    assert last.error > 1
    net[2].bias.register_hook(lambda g: g * math.nan)
    assert compare(net, lambda: F.mse_loss(net(x), y)).grade == "broken"


def test_report_shows_the_gradient():
    net = dsq.convert(nn.Sequential(blocks(), nn.LayerNorm(32)), dsq.DSQConfig("[8,4,4,8]", stash="linears"))
    report = dsq.report(net, X)  # the gradient of a plain sum would end at the norm
    assert 0.01 < report.gradient.error < 0.3
    text = str(report)
    assert text.count("\ngradient fine: error") == 1
    assert sum(", cosine " in line for line in text.splitlines()) == 5
    plain = json.loads(json.dumps(report.as_dict()))["gradient"]
    assert plain["verdict"] == report.gradient.verdict
    assert len(plain["parameters"]) == len(list(net.parameters()))
    other = dsq.report(net, X, loss=lambda result: result[..., 0].square().sum())
    assert other.gradient.error != report.gradient.error
    frozen = dsq.report(net.requires_grad_(False), X)
    assert (frozen.gradient, frozen.backward, frozen.stash_bytes) == (None, None, None)
