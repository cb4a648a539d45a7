"""Products by the compiled kernels: exact products, against float64; what they take and what they refuse."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import dsq
from dsq.formats import BFP, FixedPoint, SignedBFP, SignedNVInt
from dsq.functional import linear
from dsq.kernels.backend import Codes, MatMul, Operand
from dsq.kernels.cpu.backend import load
from dsq.kernels.cpu.library import LIBRARY, library
from dsq.kernels.dispatch import pack, quantize

if not LIBRARY.exists():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)

WEIGHT_GRADIENT = MatMul(Operand(BFP(16), 0, transposed=True), Operand(BFP(4), 0))
NARROW = MatMul(Operand(BFP(4), -1), Operand(BFP(4), 0))
BFLOAT16, INTEGER, TORCH, ONEDNN = load().gemms
INTEGER_GEMMS = library().integer_gemms()


def integer_fits(matmul):
    return INTEGER.fits(matmul, torch.float32)


def gemm_bf16(a, b, bias=None):
    return BFLOAT16.run(NARROW, a, b, bias)


@pytest.fixture(params=INTEGER_GEMMS)
def integer_gemm(request):
    """Each of this machine's in turn."""
    library().c.dsq_use_integer_gemm(INTEGER_GEMMS[request.param])
    yield request.param
    library().c.dsq_use_integer_gemm(next(iter(INTEGER_GEMMS.values())))


def gemm_integer(matmul, a, b, bias=None):
    a_format, b_format = matmul.a.format, matmul.b.format
    if not library().c.dsq_gemm_integer_fits(a_format.bits, b_format.bits, a_format.box or 16):
        pytest.skip("not with these instructions")
    return INTEGER.run(matmul, a, b, bias)


def has_too_many_bits(name, bits, box):
    if name == "avx512_vnni":
        return sum(bits) - 2 + math.log2(box) >= 31
    return max(bits) > 8 or box % 4 or (name == "avx2" and sum(bits) > 13)


needs_bf16 = pytest.mark.skipif(not BFLOAT16.fits(NARROW, torch.float32), reason="this CPU has no AVX512_BF16")
needs_integer = pytest.mark.usefixtures("integer_gemm")

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
                got = gemm_bf16(a_view.bfloat16(), b_view.bfloat16(), offset)
                expected = a.double() @ b.double() + (0 if offset is None else offset)
                assert torch.equal(got.double(), expected)


@pytest.mark.skipif(not ONEDNN.fits(NARROW, torch.float32), reason="PyTorch is built without oneDNN")
@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_onednn_multiplies_float32_of_any_strides_and_nothing_else(m, k, n):
    a, b, bias = integers((m, k), 100), integers((k, n), 100, 1), integers((n,), 1000, 2)
    for a_view, b_view, offset in itertools.product(
        (a, a.t().contiguous().t()), (b, b.t().contiguous().t()), (None, bias)
    ):
        expected = a.double() @ b.double() + (0 if offset is None else offset)
        assert torch.equal(ONEDNN.run(NARROW, a_view, b_view, offset).double(), expected)
    assert not any(ONEDNN.fits(NARROW, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64))


@pytest.mark.parametrize("biased", [True, False])
def test_a_layer_is_multiplied_by_the_torch_kernel_that_is_named(biased, monkeypatch):
    x, w = integers((2, 3, 32), 100).requires_grad_(), integers((5, 32), 100, 1)
    bias = integers((5,), 1000, 2) if biased else None
    expected = x.double() @ w.double().t() + (0 if bias is None else bias)
    for gemm in (TORCH, ONEDNN):
        monkeypatch.setenv("DSQ_GEMM", gemm.name)
        quantizers = dsq.DSQConfig(levels="[16,4,4,16]").at(0)  # no call is kept of another kernel
        y = linear(x, w, bias, replace(quantizers))
        assert torch.equal(y.double(), expected)
        y += 1  # in place, as autograd lets be done to what is no view


@needs_bf16
def test_bf16_sums_are_in_float32():
    a, b = torch.randn(64, 512).bfloat16(), torch.randn(512, 64).bfloat16()
    expected = a.double() @ b.double()
    assert (gemm_bf16(a, b) - expected).abs().max() < 1e-4
    assert ((a @ b) - expected).abs().max() > 1e-2  # what a bfloat16 result would lose


def packed(x, operand):
    return Codes(*pack(x, operand.format, operand.axis), x.shape)


def entering(x, operand):
    values = quantize(x, operand.format, operand.axis).double()
    return values.t() if operand.transposed else values


def multiplied(matmul, a, b, bias=None):
    """By the integer GEMM, of matrices as they are stored."""
    return gemm_integer(matmul, packed(a, matmul.a), packed(b, matmul.b), bias)


def assert_exact(matmul, a_stored, b_stored, bias=None, rounding=2**-24):
    """A box's integer is exact; it rounds once, to float32, and so does each sum over boxes."""
    a, b = entering(a_stored, matmul.a), entering(b_stored, matmul.b)
    offset = torch.zeros(b.shape[1]) if bias is None else bias
    boxes = a.shape[1] / (matmul.a.format.box or 16)
    bound = (boxes + 3) * rounding * (a.abs() @ b.abs() + offset.abs())
    assert ((multiplied(matmul, a_stored, b_stored, bias).double() - (a @ b + offset)).abs() <= bound).all()


@pytest.mark.parametrize(
    "bits", [(2, 2), (3, 5), (4, 4), (8, 4), (5, 8), (8, 8), (16, 2), (4, 16), (12, 12), (15, 3), (9, 8)]
)
@pytest.mark.parametrize("box", [16, 32, 4, 2, 0])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_box_products_are_exact(integer_gemm, bits, box, transposed):
    a_format, b_format = ((BFP(m, box) if box else FixedPoint(m)) for m in bits)
    a_transposed, b_transposed = transposed
    matmul = MatMul(
        Operand(a_format, 0 if a_transposed else -1, transposed=a_transposed),
        Operand(b_format, -1 if b_transposed else 0, transposed=b_transposed),
    )
    if not integer_fits(matmul):
        assert has_too_many_bits(integer_gemm, bits, box or 16)
        return
    for m, k, n in SIZES:
        a_stored = torch.randn((k, m) if a_transposed else (m, k))
        b_stored = torch.randn((n, k) if b_transposed else (k, n))
        assert_exact(matmul, a_stored, b_stored, torch.randn(n))


@needs_integer
@pytest.mark.parametrize("kinds", itertools.product((BFP, SignedBFP, SignedNVInt), repeat=2))
@pytest.mark.parametrize("bits", [(2, 3), (4, 8), (7, 6), (8, 8), (16, 4), (4, 15), (9, 8)])
@pytest.mark.parametrize("transposed", [(False, True), (True, False)])
def test_products_of_signed_formats_and_mixed_ones_are_exact(kinds, bits, transposed):
    a, b = (
        Operand(kind(m), 0 if moved == first else -1, transposed=moved)
        for kind, m, moved, first in zip(kinds, bits, transposed, (True, False), strict=True)
    )
    for m, k, n in SIZES:
        a_stored = torch.randn((k, m) if a.transposed else (m, k)) * torch.randn(1, m if a.transposed else k) ** 4
        b_stored = torch.randn((n, k) if b.transposed else (k, n))
        assert_exact(MatMul(a, b), a_stored, b_stored, torch.randn(n), rounding=2**-23)


@pytest.mark.parametrize("kinds", itertools.product((SignedBFP, SignedNVInt), repeat=2))
@pytest.mark.parametrize("bits", [(8, 8), (2, 8), (8, 5), (5, 8), (6, 7), (16, 10), (10, 16), (13, 13)])
def test_sums_of_the_code_that_has_no_opposite_fit(integer_gemm, kinds, bits):
    a, b = (Operand(kind(m), axis) for kind, m, axis in zip(kinds, bits, (-1, 0), strict=True))
    if not integer_fits(MatMul(a, b)):
        assert has_too_many_bits(integer_gemm, bits, 16)
        return
    x, w = torch.full((2, 512), 2.0), torch.full((512, 3), -4.0)
    assert (entering(x, a) == 2).all()  # -2^(bits-1) steps
    got = multiplied(MatMul(a, b), x, w)
    assert (got == 512 * -8).all()


@needs_integer
@pytest.mark.parametrize("bits", [(2, 8), (4, 4), (8, 5), (5, 8), (6, 7), (8, 8), (16, 10)])
def test_sums_of_the_largest_codes_times_the_smallest_fit(bits):
    matmul = MatMul(Operand(SignedBFP(bits[0]), -1), Operand(SignedBFP(bits[1]), 0))
    smallest = -(2.0 ** (bits[0] - 1))
    x, w = torch.full((2, 512), -smallest - 1), torch.full((512, 3), -4.0)
    x[:, ::16] = smallest  # a box's value of largest magnitude takes the code that has no opposite
    assert torch.equal(entering(x, matmul.a), x.double())
    got = multiplied(matmul, x, w)
    assert (got == x.sum(1, keepdim=True) * -4).all()


@needs_integer
@pytest.mark.parametrize("kind", [BFP, SignedBFP, SignedNVInt])
@pytest.mark.parametrize("bits", [(2, 2), (3, 3), (4, 4), (4, 5), (16, 2), (16, 4), (16, 8)])
@pytest.mark.parametrize("spread", [0, 3, 20])
def test_adding_exponents_gives_the_bits_of_multiplying_by_scales(kind, bits, spread):
    generator = torch.Generator().manual_seed(spread)
    powers = 2.0 ** -torch.randint(spread + 1, (40, 70), generator=generator).repeat_interleave(16, 1)
    a, b = torch.randn(40, 1120, generator=generator) * powers, torch.randn(1120, 45, generator=generator)
    b[16:32, :20] = 0
    matmul = MatMul(Operand(BFP(bits[0]), -1), Operand(kind(bits[1]), 0))
    got = multiplied(matmul, a, b)
    a[0] *= 2.0**80  # scales too large for exponents to be added, in this row's and its neighbours' tiles
    other = multiplied(matmul, a, b)
    other[0] /= 2.0**80
    assert torch.equal(got, other)


@needs_integer
@pytest.mark.parametrize("kind", [SignedBFP, SignedNVInt])
@pytest.mark.parametrize("bits", [4, 16])
def test_a_nan_of_a_signed_format_shows_in_the_product(kind, bits):
    matmul = MatMul(Operand(BFP(bits), -1), Operand(kind(4), 0))
    w = torch.ones(32, 8)
    w[3, 2] = torch.nan
    got = multiplied(matmul, torch.ones(3, 32), w)
    assert got.isnan().any(0).tolist() == [kind is SignedNVInt or column == 2 for column in range(8)]


@needs_integer
@pytest.mark.parametrize("bits", [(2, 2), (4, 4), (2, 8), (7, 5), (16, 2), (16, 4), (16, 8), (9, 8)])
@pytest.mark.parametrize("box", [4, 8, 16, 64, 128, 256])
@pytest.mark.parametrize("spread", [0, 1, 2, 3, 4, 6, 7, 9, 12, 13])
def test_boxes_share_an_exponent_only_as_far_as_their_codes_have_room(bits, box, spread):
    m, k, n = 70, 1100, 45
    generator = torch.Generator().manual_seed(spread)

    def spread_out(lines):
        scale = 2.0 ** torch.randint(spread + 1, (lines, -(-k // box)), generator=generator)
        scale[:, : 512 // box] = 2  # a block of calm lines
        return torch.randn(lines, k, generator=generator) * scale.repeat_interleave(box, 1)[:, :k]

    a_format, b_format = (BFP(m, box) for m in bits)
    matmul = MatMul(Operand(a_format, -1), Operand(b_format, -1, transposed=True))
    assert_exact(matmul, spread_out(m), spread_out(n))


@needs_integer
@pytest.mark.parametrize("bits", [(2, 2), (4, 4), (16, 4)])
@pytest.mark.parametrize("across", [False, True])
def test_boxes_of_zeros_and_of_subnormal_values_among_others(bits, across):
    m, k, n = 70, 1100, 45
    generator = torch.Generator().manual_seed(0)

    def with_zeros(lines, scales):
        x = torch.randn(lines, k, generator=generator) * torch.tensor(scales).repeat(lines)[:lines, None]
        zero = torch.rand(lines, -(-k // 16), generator=generator) < 0.4
        x = x.masked_fill(zero.repeat_interleave(16, 1)[:, :k], 0)
        return x.t().contiguous() if across else x

    axis = 0 if across else -1
    a_format, b_format = (BFP(m) for m in bits)
    matmul = MatMul(Operand(a_format, axis, transposed=across), Operand(b_format, axis, transposed=not across))
    a_stored, b_stored = with_zeros(m, [2.0**40]), with_zeros(n, [1.0, 2.0**-128])  # the latter's exponents are 0 too
    assert (entering(b_stored, matmul.b).abs().sum(0) > 0).all()
    assert_exact(matmul, a_stored, b_stored)


@needs_integer
@pytest.mark.parametrize("bits", [(2, 2), (7, 5), (8, 5), (5, 8), (8, 8), (16, 2), (16, 4), (16, 8), (16, 11), (12, 9)])
def test_sums_of_the_largest_codes_fit_at_any_spread(bits):
    a_format, b_format = (BFP(m) for m in bits)
    matmul = MatMul(Operand(a_format, -1), Operand(b_format, 0))
    a, column = torch.full((1, 512), float(a_format.largest_code)), torch.full((512, 1), float(b_format.largest_code))
    for spread in range(16):
        b = column.clone()
        b[:128] *= 2.0**spread
        got = multiplied(matmul, a, b)
        torch.testing.assert_close(got.double(), a.double() @ b.double(), rtol=2**-19, atol=0)


@needs_integer
@pytest.mark.parametrize("bits", [16, 8])
def test_a_box_with_a_nan_shows_in_the_product(bits):
    matmul = MatMul(Operand(BFP(bits), 0, transposed=True), Operand(BFP(4), 0))
    x = torch.ones(32, 8)
    x[3, 2] = torch.nan
    got = multiplied(matmul, x, torch.ones(32, 4))
    assert got.isnan().any(1).tolist() == [False, False, True] + [False] * 5


@needs_integer
@pytest.mark.parametrize("a_bits", [2, 16])
@pytest.mark.parametrize("calm", [64, 8])  # steps after which exponents stray: all of a line may share one, or a run
def test_a_nan_shows_beside_boxes_of_the_largest_exponents(a_bits, calm):
    matmul = MatMul(Operand(BFP(a_bits, box=8), -1), Operand(BFP(2, box=8), 0))
    a, b = torch.full((2, 128), 2.0**-60), torch.full((128, 3), 2.0**124)
    b[64:, :] = 2.0 ** (124 if calm == 64 else 100)
    b[20, 1] = torch.nan
    got = multiplied(matmul, a, b)
    assert got.isnan().tolist() == [[False, True, False]] * 2


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (Operand(BFP(16), 0, transposed=True), Operand(BFP(16), 0)),  # a box's sum passes 32 bits
        (Operand(BFP(16), 0, transposed=True), Operand(BFP(4, box=32), 0)),
        (Operand(BFP(4, box=5), -1), Operand(BFP(4, box=5), 0)),
        (Operand(BFP(4), -1), Operand(BFP(4), -1)),  # boxes that do not run along the contraction
        (Operand(BFP(4), -1), Operand(None, 0)),
    ],
)
def test_what_cannot_be_exact_is_declined(a, b):
    assert not integer_fits(MatMul(a, b))


def test_empty_products():
    if BFLOAT16.fits(NARROW, torch.float32):
        empty = torch.empty(3, 0, dtype=torch.bfloat16)
        assert torch.equal(gemm_bf16(empty, empty.t(), torch.arange(3.0)), torch.arange(3.0).expand(3, 3))
        assert gemm_bf16(torch.empty(0, 4).bfloat16(), torch.empty(4, 3).bfloat16()).shape == (0, 3)
    if integer_fits(WEIGHT_GRADIENT):
        a, b = (packed(torch.empty(0, n), f) for n, f in ((3, WEIGHT_GRADIENT.a), (2, WEIGHT_GRADIENT.b)))
        assert torch.equal(gemm_integer(WEIGHT_GRADIENT, a, b, torch.arange(2.0)), torch.arange(2.0).expand(3, 2))


@needs_integer
def test_codes_in_another_memory_order_give_the_same():
    a, b = (packed(torch.randn(32, n), f) for n, f in ((8, WEIGHT_GRADIENT.a), (4, WEIGHT_GRADIENT.b)))
    other = a._replace(codes=a.codes.t().contiguous().t())
    assert torch.equal(gemm_integer(WEIGHT_GRADIENT, a, b), gemm_integer(WEIGHT_GRADIENT, other, b))


@needs_integer
@pytest.mark.parametrize("bits", [8, 4])
def test_subnormal_steps_count_whatever_the_thread_has_set(bits):
    matmul = MatMul(Operand(BFP(8), -1), Operand(BFP(bits), 0))
    a, b = packed(torch.randn(8, 32) * 2.0**100, matmul.a), packed(torch.randn(32, 8) * 2.0**-124, matmul.b)
    expected = gemm_integer(matmul, a, b)
    torch.set_flush_denormal(True)
    try:
        found = gemm_integer(matmul, a, b)
    finally:
        torch.set_flush_denormal(False)
    assert expected.abs().max() > 0
    assert torch.equal(found, expected)
