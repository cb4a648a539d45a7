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
    "norm of order 1": lambda x: F.normalize(x - 0.5, p=1, dim=-1),
    "median": lambda x: x.median(),
    "scatter_reduce": lambda x: x.new_zeros(64, 8).scatter_reduce(1, EIGHTHS, x, "amax", include_self=False),
    "index_reduce": lambda x: x.new_zeros(8, 64).index_reduce(0, EIGHTHS[0], x, "amax", include_self=False),
    "segment_reduce": lambda x: torch.segment_reduce(x, "max", lengths=torch.tensor([20, 44])),
    "lgamma": lambda x: torch.lgamma(x),
    "digamma": lambda x: x.digamma(),
    "erfinv": lambda x: torch.special.erfinv(x),
    "remainder": lambda x: torch.remainder(torch.ones_like(x), x),
    "copysign": lambda x: torch.copysign(x, x.detach() - 0.5),
    "prod": lambda x: (2 * x).prod(-1),
    "cumprod": lambda x: (1 - x).cumprod(-1),
    "logcumsumexp": lambda x: torch.logcumsumexp(8 * x, -1),
    "cdist": lambda x: torch.cdist(x, x.flip(0)),
    "pdist": lambda x: F.pdist(x),
    "local response": lambda x: F.local_response_norm(x[None], 5),
    "clip": lambda x: torch.clip(x, 0.2, 0.8),
    "clamp_min": lambda x: x.clamp_min(0.2),
    "clamp_max in place": lambda x: x.mul(1).clamp_max_(0.8),
}
EIGHTHS = (torch.arange(64) % 8).expand(64, 64)
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


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("policies", [[name] for name in POLICIES] + [["bfp", "selective"], ["selective", "bfp"]])
@pytest.mark.parametrize("name", OPS)
def test_the_gradient_is_exact(policies, name):
    model = nn.Sequential(Applied(OPS[name]))
    values = (4 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))).sigmoid()
    true = gradient(model, values)
    for policy in policies:
        stash.apply(model, policy, **POLICIES.get(policy, {}))
    assert torch.equal(gradient(model, values), true)


REDUCTIONS = {
    "norm": lambda x, _: x.norm(dim=-1),
    "vector_norm": lambda x, _: torch.linalg.vector_norm(x, ord=3, dim=-1),
    "normalize": lambda x, y: F.normalize(x, dim=-1) * y,
    "std": lambda x, _: x.std(-1),
    "std_mean": lambda x, _: torch.std_mean(x, -1)[0],
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y, dim=-1),
    "of all pairs": lambda x, y: F.cosine_similarity(x[:, None], y[None, :40], dim=-1),
    "pairwise_distance": lambda x, y: F.pairwise_distance(x, 0.01 * y),
    "grid_sample": lambda x, y: F.grid_sample(y.view(1, 1, 32, -1), x.tanh().view(1, -1, 16, 2), align_corners=False),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_row_beside_a_far_larger_one_keeps_its_gradient(name):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(512, 32, generator=generator), torch.randn(512, 32, generator=generator)
    x[::16] *= 1000  # one of the rows whose norms share a box
    model = nn.Sequential(Applied(lambda x: REDUCTIONS[name](x, y)))
    true = gradient(model, x)
    stash.apply(model, "bfp", bits=4)
    error = (gradient(model, x) - true).norm(dim=-1) / true.norm(dim=-1)
    assert error[true.norm(dim=-1) > 0].median() < 0.15
    assert torch.isfinite(error[true.norm(dim=-1) > 0]).all()


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
