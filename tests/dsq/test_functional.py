"""dsq.functional: gradients, the stash, and refusals; tests/properties holds linear against its equations."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import dsq
from dsq.functional import linear
from dsq.kernels.dispatch import backend_for
from tests.dsq.gradients import same, saving


def inputs(tokens=37, k=24, n=40):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, k, generator=generator).requires_grad_()
    w = torch.randn(n, k, generator=generator).requires_grad_()
    b = torch.randn(n, generator=generator).requires_grad_()
    return x, w, b, torch.randn(tokens, n, generator=generator)


def quantizers(precision, **options):
    return dsq.DSQConfig(levels=precision, format="bfp", **options).at(0)


def test_double_inputs_pass_gradcheck_at_wide_precision():
    x, w, b, _ = (t.detach().double().requires_grad_() for t in inputs(5, 3, 4))
    assert torch.autograd.gradcheck(lambda x, w, b: linear(x, w, b, "[32,32,32,32]"), (x, w, b))


def test_bfp_of_more_bits_than_codes_have_quantizes_every_operand_and_saves_x_itself():
    x, w, b, dy = inputs()
    y, saved = saving(linear, x, w, b, quantizers("[20,20,20,20]"))
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), w.data_ptr()}
    dx, dw, _ = torch.autograd.grad(y, (x, w, b), dy)

    def q(t, dim=-1):
        return dsq.quantize(t, dsq.BFP(20), dim).double()

    assert torch.allclose(y.double(), q(x) @ q(w).t() + b, atol=1e-6)
    assert torch.allclose(dw.double(), q(dy, 0).t() @ q(x, 0), atol=1e-6)
    assert torch.allclose(dx, dsq.quantize((q(dy) @ q(w, 0)).float(), dsq.BFP(20)), atol=1e-4)
    assert not torch.equal(q(x).float(), x)


@pytest.mark.parametrize("needs", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_only_the_wanted_gradients_are_made_and_only_what_they_need_is_kept(needs):
    x, w, b, dy = inputs()
    tensors = [t.detach().requires_grad_(i in needs) for i, t in enumerate((x, w, b))]
    y, saved_tensors = saving(linear, *tensors, "[4,4,4,16]")
    y.backward(dy)
    full = torch.autograd.grad(linear(x, w, b, "[4,4,4,16]"), (x, w, b), dy)
    assert same([t.grad for t in tensors], [full[i] if i in needs else None for i in range(3)])
    assert any(t.dtype == torch.uint8 for t in saved_tensors) == (1 in needs)


@pytest.mark.parametrize("levels", ["[4,4,4,8]", "[4,4,4,16]"])
def test_under_autocast_operands_are_those_of_the_tensors_themselves(levels):
    weight_gradient, cpu = dsq.Quantizers.of(levels).linear_matmuls.weight_gradient, backend_for(torch.device("cpu"))
    if {gemm.name for gemm in cpu.gemms if gemm.fits(weight_gradient, torch.bfloat16)} == {"torch"}:
        pytest.skip("PyTorch multiplies dw here, and rounds it to bfloat16")
    x, w, b, dy = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x, w, b, levels)
        mixed = linear(x.bfloat16(), w, b, levels)
    assert y.dtype == mixed.dtype == torch.bfloat16
    dx, dw = torch.autograd.grad(y, (x, w), dy.bfloat16())
    exact = linear(x, w, b, levels)
    exact_dx, exact_dw = torch.autograd.grad(exact, (x, w), dy.bfloat16().float())
    for result, expected in ((y.float(), exact), (dx, exact_dx), (dw, exact_dw)):
        assert result.dtype == torch.float32
        error = (result - expected).abs().max() / expected.abs().max()
        assert error < 2**-8 if expected is exact else error < 1e-5  # only y is rounded to bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x.double(), w.double(), None, levels).dtype == torch.float64  # as F.linear
        with pytest.raises(TypeError, match="share a floating dtype"):
            linear(x, w.double(), None, levels)


@pytest.mark.parametrize("precision", ["[4,4,4,16]", "[32,32,32,32]"])
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_is_refused_for_frozen_layers_too(precision, grad):
    x, w, b, _ = (t.detach() for t in inputs())
    functions = (
        partial(linear, weight=w, bias=b, precision=precision),
        lambda x: dsq.functional.matmul(x, w.T, precision),
    )
    for function in functions:
        with torch.set_grad_enabled(grad), pytest.raises((NotImplementedError, RuntimeError), match=r"jvp|torch\.func"):
            torch.func.jvp(function, (x,), (torch.ones_like(x),))
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            assert function(x).shape[0] == len(x)  # without a tangent it is computed
            with pytest.raises(NotImplementedError, match="jvp"):
                function(forward_ad.make_dual(x, torch.ones_like(x)))


@contextmanager
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("precision", ["[2,2,2,16]", "[16,4,4,16]"])
@pytest.mark.parametrize("default", [float64_by_default, partial(torch.device, "meta")], ids=["dtype", "device"])
def test_defaults_of_pytorch_change_nothing(default, precision):
    x, w, b, dy = inputs()
    y = linear(x, w, b, precision)
    expected = (y, *torch.autograd.grad(y, (x, w, b), dy))
    with default():
        y = linear(x, w, b, precision)
        assert same((y, *torch.autograd.grad(y, (x, w, b), dy)), expected)


class Written(nn.Module):
    """Attention written out, with dsq.functional.matmul where @ stood."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 16)

    def operands(self, x):
        return self.q(x).unflatten(-1, (2, 16)).transpose(1, 2), self.k(x)[:, None].mT

    def forward(self, x):
        return dsq.functional.matmul(*self.operands(x), self.q)


@pytest.mark.parametrize("gemm", ["exact", "float32"])
@pytest.mark.parametrize("precision", ["[8,4,6,16]", "mxfp6"])
def test_products_of_activations_multiply_by_the_gemm_of_the_config(precision, gemm):
    assert {matmul.exact for matmul in quantizers(precision, gemm=gemm).activation_matmuls} == {gemm == "exact"}


def test_matmul_follows_the_layer_beside_it():
    net, x = Written(), torch.randn(2, 24, 32)
    assert torch.equal(net(x), torch.matmul(*net.operands(x)))
    dsq.convert(net, dsq.DSQConfig(levels="[4,4,4,16]", stash="linears"))
    assert dsq.report(net, x).forward.floating_point["aten.bmm"] == 2 * 2 * 2 * 24 * 24 * 16  # not asked for
    assert "dsq.functional.matmul" in str(dsq.report(net, x))
    dsq.unconvert(net)
    config = dsq.DSQConfig(levels="[4,4,4,16]", attention=True, format="bfp", eval_full_precision=True, stash="linears")
    dsq.convert(net, config)
    assert dsq.report(net, x).forward.share == dsq.report(net, x).backward.share == 1
    q, k = net.operands(x)
    expected = dsq.quantize(q, dsq.BFP(4)) @ dsq.quantize(k.mT.expand(2, 2, 24, 16), dsq.BFP(4)).mT
    torch.testing.assert_close(net(x), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(dsq.functional.matmul(q, k, config.at(0)), net(x))
    net.eval()
    assert torch.equal(net(x), torch.matmul(*net.operands(x)))
