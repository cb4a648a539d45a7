"""Ops whose backward compares what was saved, or divides by it, have PyTorch's gradient under policies that round."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dsq import stash

OPS = {
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: torch.amin(x, 0),
    "aminmax": lambda x: torch.stack(torch.aminmax(x, dim=-1)),
    "max": lambda x: x.max(),
    "min": lambda x: torch.min(x),
    "norm": lambda x: x.norm(math.inf, -1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, ord=-math.inf, dim=-1),
    "abs": lambda x: (x - 0.5).abs(),
    "l1_loss": lambda x: F.l1_loss(x, torch.full_like(x, 0.5)),
    "div": lambda x: torch.ones_like(x) / x,
    "log": lambda x: x.log(),
    "log1p": lambda x: torch.log1p(-x),
    "sqrt": lambda x: torch.sqrt(x),
    "pow": lambda x: x**-0.5,
    "atan2": lambda x: torch.atan2(x, x.flip(0)),
    "acos": lambda x: torch.acos(x),
    "logit": lambda x: torch.logit(x),
    "entropy": lambda x: torch.special.entr(x),
    "in place": lambda x: torch.ones_like(x).div_(x),
    "acosh": lambda x: (1 + x).acosh(),
    "binary cross entropy": lambda x: F.binary_cross_entropy(x, (x > 0.5).float()),
    "gaussian likelihood": lambda x: F.gaussian_nll_loss(x, x.flip(0), x),
    "divergence": lambda x: F.kl_div(x.flip(0).detach(), x, reduction="sum"),
    "pooled norm": lambda x: F.lp_pool1d(x, 3, 4),
}
POLICIES = {"bfp": {"bits": 2}, "gact": {"bits": 2}, "mesa": {}, "bfloat16": {}}


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def gradient(model, values):
    x = values.clone().requires_grad_()
    (dx,) = torch.autograd.grad(model(x * 1).sum(), x)
    return dx


@pytest.mark.parametrize("policies", [[name] for name in POLICIES] + [["bfp", "selective"], ["selective", "bfp"]])
@pytest.mark.parametrize("name", OPS)
def test_the_gradient_is_exact(policies, name):
    model = nn.Sequential(Applied(OPS[name]))
    values = (4 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))).sigmoid()
    true = gradient(model, values)
    for policy in policies:
        stash.apply(model, policy, **POLICIES.get(policy, {}))
    assert torch.equal(gradient(model, values), true)


def test_a_sign_takes_a_bit_and_a_zero_has_none():
    model, x = nn.Sequential(Applied(torch.abs)), torch.randn(64, 32)
    stash.apply(model, "bfp")
    held = stash.measure(lambda: model(x.requires_grad_().sin()).sum()).held
    assert [it.nbytes for it in held if it.module] == [64 * 32 / 8]
    x = torch.arange(-512.0, 512.0)
    assert torch.equal(gradient(model, x), x.sign())


def test_what_is_divided_is_packed():
    model, x = nn.Sequential(Applied(lambda x: x / (1 + x.mean(-1, keepdim=True)))), torch.rand(1024, 32)
    plain = stash.measure(lambda: model(x.requires_grad_() * 1).sum()).nbytes
    stash.apply(model, "bfp")
    assert stash.measure(lambda: model(x * 1).sum()).nbytes < 0.2 * plain


@pytest.mark.parametrize("function", [lambda x: x**2, lambda x: torch.max(x, 1 - x), torch.norm])
def test_others_are_packed_as_ever(function):
    model, x = nn.Sequential(Applied(function)), torch.rand(1024, 32)
    plain = stash.measure(lambda: model(x.requires_grad_() * 1).sum()).nbytes
    stash.apply(model, "bfp")
    assert stash.measure(lambda: model(x * 1).sum()).nbytes <= 0.2 * plain
