"""Saved tensors in bfloat16: half the bytes, gradients near the exact ones, and a model that is restored."""

import torch
from torch import nn

import dsq
from tests.dsq.gradients import error, gradient


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64)), torch.randn(96, 64)


def test_half_the_bytes_and_gradients_near_the_exact_ones():
    model, x = blocks()
    exact, plain = gradient(model, x), dsq.stash.measure(lambda: model(x).sum()).nbytes
    controller = dsq.stash.apply(model, "bfloat16")
    kept = dsq.stash.measure(lambda: model(x).sum()).nbytes
    assert kept < 0.51 * plain
    assert 0 < error(gradient(model, x), exact) < 0.01
    controller.remove()
    assert torch.equal(gradient(model, x), exact)


def test_an_activation_that_several_layers_read_is_kept_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 8), nn.Linear(64, 8)

        def forward(self, x):
            y = torch.sigmoid(x)
            return self.a(y) + self.b(y)

    model, x = Twice(), torch.randn(96, 64, requires_grad=True)
    dsq.stash.apply(model, "bfloat16")
    assert dsq.stash.measure(lambda: model(x).sum()).nbytes == 2 * 96 * 64
