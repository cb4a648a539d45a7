"""Gradients of random programs of the table's operations, whose values several of them read."""

import random

import pytest
import torch
from torch.nn import functional as F

from tests.dsq.gradients import same
from tests.dsq.stash.rules.exactly import Exactly, under_the_table

SHAPE = (4, 24, 24)
LEAVES = (SHAPE, (24, 24), (24,), (24,))
SEVERAL = 6  #: programs a test

#: (h, g: earlier values, w, weight, bias) -> a value of the same shape
OPERATIONS = (
    lambda h, g, w, weight, bias: F.gelu(h),
    lambda h, g, w, weight, bias: F.silu(h + 0, inplace=True),
    lambda h, g, w, weight, bias: F.gelu(h).mul_(0.5),
    lambda h, g, w, weight, bias: h.tanh(),
    lambda h, g, w, weight, bias: F.relu(F.linear(h, w), inplace=True),
    lambda h, g, w, weight, bias: F.leaky_relu(h, 0.1),
    lambda h, g, w, weight, bias: F.linear(h, w),
    lambda h, g, w, weight, bias: F.layer_norm(h, (24,), weight, bias),
    lambda h, g, w, weight, bias: F.layer_norm(h, (24,)),
    lambda h, g, w, weight, bias: F.rms_norm(h, (24,), weight),
    lambda h, g, w, weight, bias: F.dropout(h, 0.2),
    lambda h, g, w, weight, bias: F.softmax(h, -1),
    lambda h, g, w, weight, bias: F.scaled_dot_product_attention(h[:, None], g[:, None], h[:, None])[:, 0],
    lambda h, g, w, weight, bias: h @ g / 5,
    lambda h, g, w, weight, bias: h * g,
    lambda h, g, w, weight, bias: h * h / 2,
    lambda h, g, w, weight, bias: h * g[..., :1],
    lambda h, g, w, weight, bias: h * g.detach(),
    lambda h, g, w, weight, bias: h + g,
    lambda h, g, w, weight, bias: F.glu(torch.cat((h, g), -1)),
    lambda h, g, w, weight, bias: h.mT,
    lambda h, g, w, weight, bias: h[:1].expand(SHAPE),
    lambda h, g, w, weight, bias: h[:, :1].expand(SHAPE),
    lambda h, g, w, weight, bias: torch.cat((F.gelu(h[:, ::2]), F.silu(h[:, 1::2])), 1),
    lambda h, g, w, weight, bias: h[torch.tensor([2, 0, 2, 1])],
)


def run(number, leaves, handed_out):
    """Two sums of a random program's values; gradients on their way go to ``handed_out``, with copies."""
    draw, values = random.Random(number), [leaves[0] + 0.5]
    torch.manual_seed(number)
    for _ in range(draw.randint(2, 10)):
        h, g = (draw.choice((values[-1], *values)) for _ in range(2))
        y = draw.choice(OPERATIONS)(h, g, *leaves[1:])
        y.register_hook(lambda dy: handed_out.append((dy, dy.clone())))
        values.append(y)
    return [(x * torch.randn(SHAPE, dtype=x.dtype)).sum() for x in (values[-1], draw.choice(values))]


def gradients(sums, leaves, keep):
    return [g for y in sums for g in torch.autograd.grad(y, leaves, retain_graph=keep, materialize_grads=True)]


def drawn(number):
    generator = torch.Generator().manual_seed(number)
    return [(torch.randn(shape, generator=generator, dtype=torch.float64) / 3).requires_grad_() for shape in LEAVES]


PROGRAMS = pytest.mark.parametrize("first", range(0, 10 * SEVERAL, SEVERAL))


@pytest.mark.parametrize("held", [0, 1 << 60])
@PROGRAMS
def test_gradients_are_pytorchs_twice_and_none_that_was_handed_out_changes(first, held, monkeypatch):
    monkeypatch.setattr("dsq.stash.saved_forms._MAX_SHARED_BYTES", held)
    for number in range(first, first + SEVERAL):
        leaves, handed_out = drawn(number), []
        expected = gradients(run(number, leaves, []), leaves, True)
        sums, _ = under_the_table(run, number, leaves, handed_out)
        first_gradients, second_gradients = (gradients(sums, leaves, True) for _ in range(2))
        whole, _ = under_the_table(run, number, leaves, handed_out)
        torch.testing.assert_close(first_gradients, expected, rtol=1e-7, atol=1e-9)
        assert same(first_gradients, second_gradients)
        totals = (gradients([sum(of)], leaves, False) for of in (whole, sums))
        torch.testing.assert_close(*totals, rtol=1e-9, atol=1e-12)
        assert all(dy.equal(copy) for dy, copy in handed_out)


class Rounding(Exactly):
    def encode(self, values, order, role):
        return super().encode(values.bfloat16(), order, role)


@PROGRAMS
def test_gradients_are_the_same_whether_coded_values_were_held_or_unpacked_for_each_reader(first, monkeypatch):
    for number in range(first, first + SEVERAL):
        leaves, results = drawn(number), []
        for held in (0, 1 << 60):
            monkeypatch.setattr("dsq.stash.saved_forms._MAX_SHARED_BYTES", held)
            sums, _ = under_the_table(run, number, leaves, [], codec=Rounding())
            results += [gradients(sums, leaves, True) for _ in range(2)]
        assert all(map(same, results, results[1:]))
