"""A kept value that several operations read: held between them, or unpacked for each and written over."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dsq
from dsq.stash import codes


class Reads(nn.Module):
    """Reads two activations as ``reading`` says, with a linear layer before and behind."""

    def __init__(self, reading):
        super().__init__()
        self.into, self.out, self.reading = nn.Linear(32, 64), nn.Linear(64, 8), reading

    def forward(self, x):
        h = self.into(x)
        return self.out(self.reading(h, h.tanh() + 1))


READINGS = {
    "two activations": lambda h, g: F.gelu(h) + F.silu(h),
    "a gated unit": lambda h, g: F.silu(g) * h,
    "a product with itself": lambda h, g: h * h + F.silu(h),
    "transposed twice": lambda h, g: F.gelu(h) + (F.gelu(h.mT) * h.mT).mT,
    "in place": lambda h, g: F.silu(g * h, inplace=True) * h,
    "expanded": lambda h, g: F.gelu(h[:1].expand_as(h)) + g[:, :1].expand_as(h) * h,
    "expanded, then as it is": lambda h, g: F.silu(h[:1].expand_as(h)) + F.gelu(h[:1]) * g,
    "as it is, then expanded": lambda h, g: F.silu(h[:1]) + F.gelu(h[:1].expand_as(h)) * g,
    "broadcast": lambda h, g: F.gelu(h) * g[:, :, :1] + h * g,
}


@pytest.mark.parametrize("reading", READINGS)
def test_gradients_do_not_tell_whether_values_were_held(reading, monkeypatch):
    torch.manual_seed(0)
    model, x = Reads(READINGS[reading]), torch.randn(4, 48, 32)
    dsq.stash.apply(model, "bfp", bits=4)

    def gradients(held):
        monkeypatch.setattr(codes, "_HELD", held)
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    def twice():
        model.zero_grad()
        y = model(x).square().sum()
        y.backward(retain_graph=True)
        y.backward()
        return [p.grad / 2 for p in model.parameters()]

    held, anew = gradients(1 << 60), gradients(0)
    for one, other, half in zip(held, anew, twice(), strict=True):
        assert one.equal(other)
        assert one.equal(half)
