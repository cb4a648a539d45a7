"""Products by the compiled kernels: exact against float64 at the limits of their sums, and the products they decline.

The conformance suite shows that every width, format, transposed operand and ragged size is exact.
"""

import itertools
from dataclasses import replace

import pytest
import torch

import dsq
from dsq.formats import BFP, NAMED, SignedNVInt
from dsq.functional import linear
from dsq.kernels.backend import Codes, MatMul, Operand
from dsq.kernels.conformance import product_disagreements, products
from dsq.kernels.cpu.backend import load
from dsq.kernels.cpu.library import LIBRARY, library
from dsq.kernels.dispatch import gemm_for, pack, quantize
from dsq.ops.products import multiply

if not LIBRARY.exists():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)

NARROW = MatMul(Operand(BFP(4), -1), Operand(BFP(4), 0))
BFLOAT16, INTEGER, ELEMENTS, BFLOAT16_ELEMENTS, AMX, TORCH, ONEDNN = load().gemms
INTEGER_GEMMS = library().usable(library().c.dsq_integer_gemm)
SIZES = [(1, 1, 1), (3, 5, 7), (14, 256, 32), (15, 257, 33), (100, 600, 70)]
needs_integer = pytest.mark.usefixtures("integer_gemm")
needs_bf16 = pytest.mark.skipif(not BFLOAT16.fits(NARROW, torch.float32), reason="this CPU has no AVX512_BF16")


@pytest.fixture(params=INTEGER_GEMMS)
def integer_gemm(request):
    """Use each of this machine's integer kernels in turn."""
    library().c.dsq_use_integer_gemm(INTEGER_GEMMS[request.param])
    yield request.param
    library().c.dsq_use_integer_gemm(next(iter(INTEGER_GEMMS.values())))


def fits(matmul):
    return INTEGER.fits(matmul, torch.float32)


def along(*formats):
    """Return a product of operands with blocks along the contraction, neither transposed."""
    return MatMul(Operand(formats[0], -1), Operand(formats[1], 0))


def packed(x, operand):
    return Codes(*pack(x, operand.format, operand.axis), x.shape)


def quantized(x, operand):
    values = quantize(x, operand.format, operand.axis).double()
    return values.t() if operand.transposed else values


def multiplied(matmul, a, b, bias=None):
    """Multiply matrices, as they are stored, by the integer GEMM."""
    return INTEGER.run(matmul, packed(a, matmul.a), packed(b, matmul.b), bias)


def assert_exact(matmul, a_stored, b_stored, bias=None):
    """Check the product. A block's integer is exact and rounds once to float32, and so does each sum over blocks."""
    a, b = quantized(a_stored, matmul.a), quantized(b_stored, matmul.b)
    offset = torch.zeros(b.shape[1]) if bias is None else bias
    bound = (a.shape[1] / (matmul.a.format.block_size or 16) + 3) * 2**-23 * (a.abs() @ b.abs() + offset.abs())
    assert ((multiplied(matmul, a_stored, b_stored, bias).double() - (a @ b + offset)).abs() <= bound).all(), matmul


def integers(shape, largest, seed=0):
    return torch.randint(-largest, largest + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


@needs_integer
def test_the_products_of_the_suite_that_fit_conform():
    gemms = INTEGER, ELEMENTS, BFLOAT16_ELEMENTS
    fitting = [p for p in products() if any(gemm.fits(p.matmul, torch.float32) for gemm in gemms)]
    assert [str(product) for product in fitting if product_disagreements(load(), product, torch.device("cpu"))] == []
    assert len(fitting) > 300


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4_2d", "mx6", "int8_row", "int8_tensor"])
def test_products_of_no_elements(name):
    matmul = MatMul(Operand(NAMED[name], -1), Operand(NAMED[name], -1, transposed=True))
    for rows, depth, columns in [(0, 64, 5), (5, 0, 4), (5, 64, 0)]:
        assert torch.equal(
            multiply(matmul, torch.randn(rows, depth), torch.randn(columns, depth)), torch.zeros(rows, columns)
        )


@needs_integer
def test_elements_are_multiplied_by_scales_whose_product_is_below_the_range_of_float32():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 2.0**-60
    nvfp4 = Operand(NAMED["nvfp4"], -1), Operand(NAMED["nvfp4"], -1, transposed=True)
    y = multiply(MatMul(*nvfp4), x, x)
    values = dsq.quantize(x, "nvfp4").double()
    torch.testing.assert_close(y.double(), values @ values.t(), rtol=1e-5, atol=0)


def test_a_product_fits_if_its_sums_fit(integer_gemm):
    for bits, block_size in itertools.product(itertools.product((2, 4, 8, 9, 13, 16), repeat=2), (16, 2, 256)):
        a, b = (BFP(width, block_size) for width in bits)
        expected = a.largest_code * b.largest_code * block_size < 1 << 31
        if integer_gemm == "neon":
            expected = max(bits) <= 8 and block_size % 4 == 0
        assert fits(along(a, b)) == expected, (bits, block_size)
    for a, b in [
        (Operand(BFP(4), 0, transposed=True), Operand(BFP(4, block_size=32), 0)),
        (Operand(BFP(4, block_size=5), -1), Operand(BFP(4, block_size=5), 0)),
        (Operand(BFP(4), -1), Operand(BFP(4), -1)),  # blocks that do not run along the contraction
        (Operand(BFP(4), -1), Operand(None, 0)),
    ]:
        assert not fits(MatMul(a, b))


def test_units_that_flush_or_round_fit_no_product_in_float32_or_float64():
    for gemm in (BFLOAT16, INTEGER):
        assert not gemm.fits(replace(NARROW, exact=False), torch.float32)
        assert not gemm.fits(NARROW, torch.float64)
        assert gemm.fits(NARROW, torch.float16) == gemm.fits(NARROW, torch.bfloat16) == gemm.fits(NARROW, torch.float32)
    if BFLOAT16.fits(NARROW, torch.float32):
        assert [BFLOAT16.fits(along(BFP(4), BFP(bits)), torch.float32) for bits in (9, 10)] == [True, False]


@needs_bf16
@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_bf16_and_onednn_products_are_exact_of_any_strides(m, k, n):
    # sums of products of small integers stay below 2**24, so any rounding at all would show
    a, b, bias = integers((m, k), 100), integers((k, n), 100, 1), integers((n,), 1000, 2)
    for a_view, b_view, offset in itertools.product(
        (a, a.t().contiguous().t()), (b, b.t().contiguous().t()), (None, bias)
    ):
        expected = a.double() @ b.double() + (0 if offset is None else offset)
        assert torch.equal(BFLOAT16.run(NARROW, a_view.bfloat16(), b_view.bfloat16(), offset).double(), expected)
        if ONEDNN.fits(NARROW, torch.float32):
            assert torch.equal(ONEDNN.run(NARROW, a_view, b_view, offset).double(), expected)
    assert not any(ONEDNN.fits(NARROW, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64))


@needs_integer
def test_blocks_of_every_length_share_an_exponent_if_their_codes_fit():
    widths = [(2, 2), (4, 4), (2, 8), (7, 5), (16, 2), (16, 8), (9, 8)]
    for (block_size, bits), spread in itertools.product(
        itertools.product((4, 8, 16, 64, 256), widths), (0, 2, 3, 6, 9, 13)
    ):
        matmul = MatMul(Operand(BFP(bits[0], block_size), -1), Operand(BFP(bits[1], block_size), -1, transposed=True))
        if not fits(matmul):
            continue
        generator, lines = torch.Generator().manual_seed(spread), []
        for number in (35, 45):
            scale = 2.0 ** torch.randint(spread + 1, (number, -(-1100 // block_size)), generator=generator)
            scale[:, : 512 // block_size] = 2  # a block of calm lines
            lines.append(
                torch.randn(number, 1100, generator=generator) * scale.repeat_interleave(block_size, 1)[:, :1100]
            )
        assert_exact(matmul, *lines, torch.randn(45, generator=generator))


@needs_integer
def test_blocks_of_zeros_and_of_subnormal_values_among_others():
    m, k, n = 70, 1100, 45
    generator = torch.Generator().manual_seed(0)

    def with_zeros(lines, scales, across):
        x = torch.randn(lines, k, generator=generator) * torch.tensor(scales).repeat(lines)[:lines, None]
        zero = torch.rand(lines, -(-k // 16), generator=generator) < 0.4
        x = x.masked_fill(zero.repeat_interleave(16, 1)[:, :k], 0)
        return x.t().contiguous() if across else x

    for bits, across in itertools.product([(2, 2), (4, 4), (16, 4)], (False, True)):
        axis = 0 if across else -1
        a, b = (BFP(m) for m in bits)
        matmul = MatMul(Operand(a, axis, transposed=across), Operand(b, axis, transposed=not across))
        if fits(matmul):
            a_stored = with_zeros(m, [2.0**40], across)
            b_stored = with_zeros(n, [1.0, 2.0**-128], across)  # the latter's exponents are 0 too
            assert (quantized(b_stored, matmul.b).abs().sum(0) > 0).all()
            assert_exact(matmul, a_stored, b_stored)


@needs_integer
def test_sums_of_the_largest_and_the_smallest_codes_fit():
    for bits in [(2, 8), (4, 4), (8, 5), (5, 8), (6, 7), (8, 8), (16, 10), (10, 16), (13, 13)]:
        matmul = along(SignedNVInt(bits[0]), SignedNVInt(bits[1]))
        if fits(matmul):
            smallest, w = -(2.0 ** (bits[0] - 1)), torch.full((512, 3), -4.0)  # w's codes have no opposite
            largest = torch.full((2, 512), -smallest - 1)
            largest[:, ::16] = smallest  # a block's value of largest magnitude takes the code that has no opposite
            for x in (torch.full((2, 512), smallest), largest):
                assert torch.equal(quantized(x, matmul.a), x.double())
                assert (multiplied(matmul, x, w) == x.sum(1, keepdim=True) * -4).all()
    for bits, spread in itertools.product([(2, 2), (7, 5), (8, 8), (16, 2), (16, 8), (16, 11), (12, 9)], range(16)):
        matmul = along(BFP(bits[0]), BFP(bits[1]))  # the largest at any spread of exponents
        if fits(matmul):
            a, b = (torch.full((512,), float(operand.format.largest_code)) for operand in (matmul.a, matmul.b))
            b[:128] *= 2.0**spread
            product = multiplied(matmul, a[None], b[:, None])
            torch.testing.assert_close(product.double(), a.double()[None] @ b.double()[:, None], rtol=2**-19, atol=0)


@needs_integer
def test_adding_exponents_gives_the_bits_of_multiplying_by_scales():
    for kind, bits, spread in itertools.product(
        (BFP, SignedNVInt), [(2, 2), (3, 3), (4, 5), (16, 2), (16, 8)], (0, 3, 20)
    ):
        matmul, generator = along(BFP(bits[0]), kind(bits[1])), torch.Generator().manual_seed(spread)
        if not fits(matmul):
            continue
        powers = 2.0 ** -torch.randint(spread + 1, (40, 70), generator=generator).repeat_interleave(16, 1)
        a, b = torch.randn(40, 1120, generator=generator) * powers, torch.randn(1120, 45, generator=generator)
        b[16:32, :20] = 0
        by_exponents = multiplied(matmul, a, b)
        a[0] *= 2.0**80  # scales too large for exponents to be added, in this row's and its neighbors' tiles
        by_scales = multiplied(matmul, a, b)
        by_scales[0] /= 2.0**80
        assert torch.equal(by_exponents, by_scales)


@needs_integer
def test_a_nan_shows_in_its_row_or_column_and_no_other():
    for a, b in [(4, 4), (8, 4), (16, 4)]:
        matmul, w = MatMul(Operand(BFP(a), 0, transposed=True), Operand(BFP(b), 0)), torch.ones(32, 8)
        if not fits(matmul):
            continue
        x = torch.ones(32, 8)
        x[3, 2] = torch.nan
        assert multiplied(matmul, x, w).isnan().any(1).tolist() == [row == 2 for row in range(8)]
        for kind in (BFP, SignedNVInt):  # of one tensor scale, all of it
            product = multiplied(along(BFP(a), kind(b)), torch.ones(3, 32), x)
            assert product.isnan().any(0).tolist() == [kind is SignedNVInt or column == 2 for column in range(8)]
    for a_bits, calm in itertools.product((2, 16), (64, 8)):  # beside blocks of the largest exponents
        matmul = along(BFP(a_bits, block_size=8), BFP(2, block_size=8))
        if fits(matmul):
            a, b = torch.full((2, 128), 2.0**-60), torch.full((128, 3), 2.0**124)
            b[64:, :] = 2.0 ** (124 if calm == 64 else 100)
            b[20, 1] = torch.nan
            assert multiplied(matmul, a, b).isnan().tolist() == [[False, True, False]] * 2


def test_empty_products_are_the_bias():
    a, b, bias = torch.empty(3, 0), torch.empty(0, 2), torch.arange(2.0)
    assert torch.equal(multiplied(along(BFP(4), BFP(4)), a, b, bias), bias.expand(3, 2))
    if BFLOAT16.fits(NARROW, torch.float32):
        assert torch.equal(BFLOAT16.run(NARROW, a.bfloat16(), b.bfloat16(), bias), bias.expand(3, 2))
        assert BFLOAT16.run(NARROW, torch.empty(0, 4).bfloat16(), torch.empty(4, 3).bfloat16(), None).shape == (0, 3)


@needs_integer
def test_subnormal_steps_count_whatever_the_thread_has_set_and_codes_in_another_order():
    for bits in (8, 4):
        matmul = along(BFP(4), BFP(bits))
        a, b = packed(torch.randn(8, 32) * 2.0**100, matmul.a), packed(torch.randn(32, 8) * 2.0**-124, matmul.b)
        expected = INTEGER.run(matmul, a, b, None)
        torch.set_flush_denormal(True)
        try:
            with_flushing = INTEGER.run(matmul, a, b, None)
        finally:
            torch.set_flush_denormal(False)
        assert expected.abs().max() > 0
        assert torch.equal(with_flushing, expected)
        strided = a._replace(codes=a.codes.t().contiguous().t())
        assert torch.equal(INTEGER.run(matmul, strided, b, None), expected)


@pytest.mark.parametrize("gemm", ["integer", "bfloat16", "amx", "torch", "onednn"])
def test_a_layer_is_multiplied_by_the_kernel_that_is_named_and_its_weight_may_be_transposed_in_memory(
    gemm, monkeypatch
):
    monkeypatch.setenv("DSQ_GEMM", gemm)
    for levels, format, rounding in itertools.product(
        ("[4,4,4,16]", "[16,4,4,16]"), ("bfp", "snvint", "fixed"), ("nearest", "stochastic")
    ):
        gemm_for.cache_clear()
        quantizers = dsq.DSQConfig(levels=levels, format=format, rounding=rounding).at(0)  # no plan is reused
        x, weight, bias = torch.randn(2, 19, 33), torch.randn(21, 33), torch.randn(21)
        results = []
        for stored in (weight, weight.t().contiguous().t()):
            torch.manual_seed(0)
            leaves = [leaf.detach().requires_grad_() for leaf in (x, stored, bias)]
            y = linear(*leaves, quantizers)
            y.square().sum().backward()
            results.append((y, *(leaf.grad for leaf in leaves)))
            y += 1  # autograd allows this in place, as y is no view
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
