"""GEMMs on narrow units: exact products, against float64."""

import pytest
import torch

import dsq
from dsq import kernels

needs_bf16 = pytest.mark.skipif(not kernels.has_gemm_bf16("cpu"), reason="this CPU has no AVX512_BF16 units")
needs_boxes = pytest.mark.skipif(
    not kernels.has_gemm_boxes("cpu", dsq.BFP(16).grid, dsq.BFP(4).grid), reason="this CPU has no AVX512_VNNI units"
)

SIZES = [(1, 1, 1), (3, 5, 7), (14, 256, 32), (15, 257, 33), (37, 51, 45), (100, 600, 70)]


def integers(shape, largest, seed=0):
    return torch.randint(-largest, largest + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


@needs_bf16
@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_bf16_products_are_exact(m, k, n):
    # sums of products of small integers stay below 2**24, so any rounding at all would show
    a, b, bias = integers((m, k), 100), integers((k, n), 100, 1), integers((n,), 1000, 2)
    for a_view in (a, a.t().contiguous().t()):
        for b_view in (b, b.t().contiguous().t()):
            for offset in (None, bias):
                got = kernels.gemm_bf16(a_view.bfloat16(), b_view.bfloat16(), offset)
                expected = a.double() @ b.double() + (0 if offset is None else offset)
                assert torch.equal(got.double(), expected)


@needs_bf16
def test_bf16_sums_are_in_float32():
    a, b = torch.randn(64, 512).bfloat16(), torch.randn(512, 64).bfloat16()
    expected = a.double() @ b.double()
    assert (kernels.gemm_bf16(a, b) - expected).abs().max() < 1e-4
    assert ((a @ b) - expected).abs().max() > 1e-2  # what a bfloat16 result would lose


@needs_boxes
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8, 9, 12])
@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_box_products_are_exact(m, k, n, bits):
    x_KM, y_KN = torch.randn(k, m), torch.randn(k, n)
    for wide, narrow in [
        (dsq.BFP(16), dsq.BFP(bits)),
        (dsq.BFP(bits), dsq.BFP(16)),
        (dsq.BFP(11), dsq.BFP(bits)),
        (dsq.FixedPoint(16), dsq.FixedPoint(bits)),
        (dsq.BFP(10, box=32), dsq.BFP(bits, box=32)),
    ]:
        a, b = dsq.pack(x_KM, wide, 0), dsq.pack(y_KN, narrow, 0)
        operands = (a.codes, a.exponents), wide.grid, (b.codes, b.exponents), narrow.grid
        got = kernels.gemm_boxes(*operands, m, n, k)
        a_KM, b_KN = a.unpack().double(), b.unpack().double()
        # a box's integers are exact; only the float32 sum over boxes rounds
        bound = (k / 16 + 2) * 2**-24 * (a_KM.abs().t() @ b_KN.abs())
        assert ((got.double() - a_KM.t() @ b_KN).abs() <= bound).all()


@needs_boxes
def test_a_box_with_a_nan_shows_in_the_product():
    x = torch.ones(32, 8)
    x[3, 2] = torch.nan
    a, b = dsq.pack(x, dsq.BFP(16), 0), dsq.pack(torch.ones(32, 4), dsq.BFP(4), 0)
    got = kernels.gemm_boxes((a.codes, a.exponents), a.fmt.grid, (b.codes, b.exponents), b.fmt.grid, 8, 4, 32)
    assert got.isnan().any(1).tolist() == [False, False, True] + [False] * 5


def test_what_cannot_be_exact_is_declined():
    wide = dsq.BFP(16).grid
    assert not kernels.has_gemm_boxes("cpu", wide, wide)  # a box's sum passes 32 bits
    assert not kernels.has_gemm_boxes("cpu", wide, dsq.BFP(4, box=32).grid)
    assert not kernels.has_gemm_boxes("cpu", wide, dsq.BFP(4, box=5).grid)
    assert not kernels.has_gemm_boxes("cpu", wide, None)


def test_empty_products():
    if kernels.has_gemm_bf16("cpu"):
        empty = torch.empty(3, 0, dtype=torch.bfloat16)
        assert torch.equal(kernels.gemm_bf16(empty, empty.t(), torch.arange(3.0)), torch.arange(3.0).expand(3, 3))
        assert kernels.gemm_bf16(torch.empty(0, 4).bfloat16(), torch.empty(4, 3).bfloat16()).shape == (0, 3)


@needs_bf16
def test_operands_that_do_not_fit_are_refused():
    a = torch.zeros(4, 8, dtype=torch.bfloat16)
    for operands in [(a, a), (a[0], a.t()), (a.float(), a.t())]:
        with pytest.raises(ValueError, match=r"a \(M, K\) and b \(K, N\) must be bfloat16, got torch\.\w+ \("):
            kernels.gemm_bf16(*operands)
    with pytest.raises(ValueError, match=r"bias must be float32 \(4,\), got torch.float32 \(8,\)"):
        kernels.gemm_bf16(a, a.t(), torch.zeros(8))
    with pytest.raises(ValueError, match="a, b and bias must be on one device"):
        kernels.gemm_bf16(a, a.t(), torch.zeros(4, device="meta"))


@needs_boxes
def test_codes_that_do_not_fit_are_refused():
    wide, narrow = dsq.pack(torch.randn(32, 8), dsq.BFP(16), 0), dsq.pack(torch.randn(32, 4), dsq.BFP(4), 0)
    a, b = (wide.codes, wide.exponents), (narrow.codes, narrow.exponents)
    with pytest.raises(ValueError, match=r"no unit of this machine multiplies Grid"):
        kernels.gemm_boxes(a, wide.fmt.grid, b, dsq.BFP(4, box=32).grid, 8, 4, 32)
    with pytest.raises(ValueError, match=r"codes and exponents must be uint8 of shapes"):
        kernels.gemm_boxes(a, wide.fmt.grid, b, narrow.fmt.grid, 8, 4, 64)


@needs_boxes
def test_codes_in_another_memory_order_give_the_same():
    wide, narrow = dsq.pack(torch.randn(32, 8), dsq.BFP(16), 0), dsq.pack(torch.randn(32, 4), dsq.BFP(4), 0)
    codes = wide.codes.t().contiguous().t()
    products = [
        kernels.gemm_boxes(
            (c, wide.exponents), wide.fmt.grid, (narrow.codes, narrow.exponents), narrow.fmt.grid, 8, 4, 32
        )
        for c in (wide.codes, codes)
    ]
    assert torch.equal(*products)
