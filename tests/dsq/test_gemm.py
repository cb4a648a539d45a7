"""Which units a GEMM runs on, and that the choice does not change the numbers."""

import pytest
import torch

import dsq
from dsq import kernels
from dsq.functional import linear
from dsq.gemm import _split, gemm, multiplies_packed


@pytest.mark.parametrize("bits", range(2, 17))
def test_two_bfloat16_parts_hold_any_value_of_16_bits(bits):
    x = dsq.quantize(torch.randn(64, 64) * 2.0 ** torch.randint(-30, 30, (64, 1)), dsq.BFP(bits))
    high, low = _split(x)
    assert torch.equal(high.double() + low.double(), x.double())
    assert torch.equal(low, torch.zeros_like(low)) or bits > 9


def test_the_choice_follows_the_formats_and_the_device():
    narrow, wide, full = dsq.BFP(4), dsq.BFP(16), dsq.BFP(32)

    def choose(a, b, units="exact"):
        return gemm(a, b, torch.float32, "cpu", units)

    if kernels.has_gemm_bf16("cpu"):
        assert choose(narrow, dsq.BFP(9)).a == torch.bfloat16
    assert choose(narrow, dsq.BFP(10)).a == torch.float32
    assert choose(wide, wide).b == torch.float32
    assert choose(full, narrow).b == torch.float32
    assert choose(narrow, narrow, "float32").a == torch.float32
    x = torch.empty(1)
    assert multiplies_packed(wide, narrow, x, "exact") == kernels.has_gemm_boxes("cpu", wide.grid, narrow.grid)
    assert not multiplies_packed(wide, narrow, x, "float32")
    assert not multiplies_packed(wide, narrow, x.half(), "exact")
    assert not multiplies_packed(narrow, narrow, x, "exact")


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
