"""A product of two activations: the equations in float64, and a packed stash."""

import pytest
import torch

import dsq
from dsq.ops.products import product, product_matmuls


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


@pytest.mark.parametrize("shape", [(2, 1, 32, 48), (32, 48)])
def test_an_operand_that_serves_several_matrices_is_stashed_once(shape):
    a, b = torch.randn(2, 3, 16, 32, requires_grad=True), torch.randn(shape, requires_grad=True)
    matmuls, kept = product_matmuls(dsq.BFP(8), dsq.BFP(4), dsq.BFP(6)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        y = product(a, b, matmuls)
    dy = torch.randn(y.shape)
    repeated = product(a, b.expand(2, 3, 32, 48), matmuls)
    assert torch.equal(y, repeated)
    da, db = torch.autograd.grad(y, (a, b), dy)
    expected_da, expected_db = torch.autograd.grad(repeated, (a, b), dy)
    assert torch.equal(da, expected_da)
    torch.testing.assert_close(db, expected_db, rtol=1e-5, atol=1e-5)
    assert sum(x.nbytes for x in kept) == (a.numel() + b.numel()) * 4.5 / 8


def test_under_autocast_operands_are_those_of_the_tensors_themselves():
    """Weights of a softmax are float32 there, values bfloat16."""
    a, b = torch.rand(3, 24, 32, requires_grad=True), torch.randn(3, 32, 16).bfloat16().requires_grad_()
    matmuls = product_matmuls(dsq.BFP(8), dsq.BFP(4), dsq.BFP(6))
    with torch.autocast("cpu", torch.bfloat16):
        y = product(a, b, matmuls)
        assert torch.equal(product(a.detach(), b.detach(), matmuls), y)
    y.sum().backward()
    assert (y.dtype, a.grad.dtype, b.grad.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    expected = quantised(a.detach(), dsq.BFP(8), -1) @ quantised(b.detach(), dsq.BFP(8), -2)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-3)


def test_dtypes_that_differ_are_refused():
    with pytest.raises(TypeError, match=r"a and b must share a floating dtype, got torch\.float32 and torch\.bfloat16"):
        dsq.functional.matmul(torch.ones(2, 3), torch.ones(3, 2).bfloat16(), "[4,4,4,16]")


def test_leading_dimensions_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"got \(3, 2, 8, 4\) and \(2, 2, 4, 8\)"):
        dsq.functional.matmul(torch.ones(3, 2, 8, 4), torch.ones(2, 2, 4, 8), "[4,4,4,16]")
