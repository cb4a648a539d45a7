"""Quantised layers that read one memory in other shapes or orders each have their own codes."""

import pytest
import torch
from torch import nn

import dsq
from tests.dsq.gradients import error

VIEWS = {
    "transposed first": (lambda x: x.transpose(0, 1), lambda x: x),
    "transposed last": (lambda x: x, lambda x: x.transpose(0, 1)),
    "wider first": (lambda x: x.reshape(16, 12, 64), lambda x: x),
    "wider last": (lambda x: x, lambda x: x.reshape(16, 12, 64)),
    "the same": (lambda x: x, lambda x: x),
}


class Two(nn.Module):
    def __init__(self, first, last):
        super().__init__()
        self.views = first, last
        widths = [view(torch.zeros(16, 24, 32)).shape[-1] for view in self.views]
        self.layers = nn.ModuleList(nn.Linear(width, 32) for width in widths)

    def forward(self, x):
        x = x + 0  # an activation, which nobody keeps yet
        return torch.cat([layer(view(x)).flatten() for layer, view in zip(self.layers, self.views, strict=True)])


@pytest.mark.parametrize("views", VIEWS)
def test_gradients_of_views_of_one_memory(views):
    torch.manual_seed(0)
    model, x = Two(*VIEWS[views]), torch.randn(16, 24, 32)
    upstream = torch.randn(model(x).shape)

    def gradient():
        model.zero_grad()
        model(x).mul(upstream).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    exact = gradient()
    dsq.convert(model, dsq.DSQConfig("[16,8,16,16]", stash="all"))
    assert error(gradient(), exact) < 0.02
