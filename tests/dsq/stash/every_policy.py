"""Small models, a plain loop and a model's snapshot, for the tests that every policy has to pass."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from analysis.models import encoder
from dsq.stash.policy import compatible

#: the policies: options, and how near to the exact gradient they then are
NEAR = {
    "bfp": ({"bits": 8}, 0.05),
    "checkpoint": ({}, 0),
    "gact": ({"bits": 8, "adapt_interval": 2}, 0.05),
    "mesa": ({}, 0.02),
    "selective": ({}, 0),
    "wtacrs": ({"ratio": 1.0}, 0.01),
}
NAMES = tuple(NEAR)
PAIRS = [(a, b) for a, b in itertools.combinations(NAMES, 2) if compatible(a, b)]


def small(dropout=0.0):
    torch.manual_seed(0)
    return encoder(blocks=2, width=32, heads=4, ffn=64, dropout=dropout)


class Of(nn.Module):
    """A function of an input and of parameters."""

    def __init__(self, function: Callable[..., Tensor], *parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.ParameterList(nn.Parameter(p.clone()) for p in parameters)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, *self.inner)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x + 0, use_reentrant=self.reentrant)


class SelfAttention(nn.Module):
    """nn.MultiheadAttention of one tensor."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, heads, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)[0]


def train(model, steps=4, seed=3):
    """A plain loop; the losses."""
    torch.manual_seed(seed)
    x, y = torch.randn(8, 16, 32), torch.randn(8, 16, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def snapshot(model):
    """Everything remove() must restore."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks += ("_forward_hooks_always_called", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    return [(type(m), sorted(m.__dict__), *(list(getattr(m, h)) for h in hooks)) for m in model.modules()]
