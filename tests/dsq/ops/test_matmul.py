"""Which units a product runs on, and that the choice does not change the numbers."""

from dataclasses import fields

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dsq
from dsq.functional import linear
from dsq.kernels.backend import MatMul, Operand, parse_matmul
from dsq.kernels.cpu.library import library
from dsq.kernels.dispatch import backend_for
from dsq.kernels.triton.gemm import split


@pytest.mark.parametrize("bits", range(2, 17))
def test_two_bfloat16_parts_hold_any_value_of_16_bits(bits):
    x = dsq.quantize(torch.randn(64, 64) * 2.0 ** torch.randint(-30, 30, (64, 1)), dsq.BFP(bits))
    high, low = split(x)
    assert torch.equal(high.double() + low.double(), x.double())
    assert torch.equal(low, torch.zeros_like(low)) or bits > 9


def weight_gradient(a_bits, b_bits, exact=True):
    return MatMul(Operand(dsq.BFP(a_bits), 0, transposed=True), Operand(dsq.BFP(b_bits), 0), exact=exact)


def test_what_fits_follows_the_formats_and_the_device():
    cpu = backend_for(torch.device("cpu"))

    def chosen(matmul, dtype=torch.float32):
        fitting = [gemm for gemm in cpu.gemms if gemm.fits(matmul, dtype)]
        return fitting[0].name

    def way(a_bits, b_bits, dtype=torch.float32, exact=True):
        return chosen(weight_gradient(a_bits, b_bits, exact), dtype)

    def on_codes(a_bits, b_bits):
        c = library().c
        return "integer" if c.dsq_has_gemm(c.GEMM_INTEGER) and c.dsq_gemm_integer_fits(a_bits, b_bits, 16) else "torch"

    assert way(4, 9) == ("bfloat16" if library().has_gemm("GEMM_BFLOAT16") else on_codes(4, 9))
    assert way(16, 4) == way(10, 4) == on_codes(16, 4)
    assert way(16, 16) == "torch"
    assert way(4, 4, exact=False) == way(16, 4, exact=False) == "torch"
    assert way(4, 4, torch.float16) == way(4, 4, torch.bfloat16) == way(4, 4)
    assert way(4, 4, torch.float64) == "torch"
    output = MatMul(Operand(dsq.BFP(16), -1), Operand(dsq.BFP(4), -1, transposed=True))
    assert chosen(output) == on_codes(16, 4)
    boxes_elsewhere = MatMul(Operand(dsq.BFP(16), -1), Operand(dsq.BFP(4), 0, transposed=True))
    assert chosen(boxes_elsewhere) == "torch"


@pytest.mark.parametrize("precision", ["[2,2,2,16]", "[4,4,4,16]", "[16,4,4,16]", "[8,8,8,16]", "[16,4,16,16]"])
@pytest.mark.parametrize("options", [{}, {"format": "fixed"}, {"box": 32}, {"box_axis": "last"}])
def test_the_units_do_not_change_the_numbers(precision, options):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(70, 96, generator=generator), torch.randn(48, 96, generator=generator))
    b, dy = torch.randn(48, generator=generator), torch.randn(70, 48, generator=generator)
    results = []
    for units in ("exact", "float32"):
        leaves = [t.clone().requires_grad_() for t in (x, w, b)]
        y = linear(*leaves, dsq.DSQConfig(levels=precision, units=units, **options).at(0))
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    for exact, plain in zip(*results, strict=True):
        torch.testing.assert_close(exact, plain, rtol=1e-4, atol=1e-4 * plain.abs().max().item())


@pytest.mark.parametrize("precision", ["[4,4,4,16]", "[16,4,4,16]", "[4,32,4,16]"])
def test_a_mode_sees_products_as_operators_of_the_same_bits_and_counts_them(precision):
    net = dsq.convert(torch.nn.Linear(64, 32), dsq.DSQConfig(levels=precision))
    x = torch.randn(2, 48, 64, requires_grad=True)

    def gradients():
        x.grad = net.weight.grad = net.bias.grad = None
        net(x).square().sum().backward()
        return x.grad, net.weight.grad, net.bias.grad

    expected = gradients()
    with FlopCounterMode(display=False) as counter:
        seen = gradients()
    assert all(map(torch.equal, seen, expected))
    assert counter.get_total_flops() == 3 * 2 * 96 * 64 * 32


def test_a_product_is_read_back_from_its_text():
    for matmul in dsq.Quantizers.of("[4,32,4,16]").matmuls:
        again = parse_matmul(matmul.text)
        assert all(getattr(again, f.name) == getattr(matmul, f.name) for f in fields(MatMul))
