"""A product of two activations: the equations in float64, and a packed stash."""

import torch

import dsq
from dsq.ops.product import product, product_matmuls


def quantised(x, fmt, axis):
    return dsq.quantize(x, fmt, axis).double()


def test_forward_and_gradients_are_the_equations():
    q0, q1, q2 = dsq.BFP(8), dsq.BFP(4), dsq.BFP(6)
    a, b = torch.randn(48, 32, requires_grad=True), torch.randn(32, 80, requires_grad=True)
    dy = torch.randn(48, 80)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        y = product(a, b, product_matmuls(q0, q1, q2))
    y.backward(dy)
    expected = quantised(a.detach(), q0, 1) @ quantised(b.detach(), q0, 0)
    da = quantised(dy, q2, 1) @ quantised(b.detach(), q1, 1).t()
    db = quantised(a.detach(), q1, 0).t() @ quantised(dy, q2, 0)
    for found, exact in ((y, expected), (a.grad, da), (b.grad, db)):
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert sum(x.nbytes for x in kept) == (48 * 32 + 32 * 80) * 4.5 / 8
