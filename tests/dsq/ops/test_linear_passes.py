"""A layer's passes in one call each give what the kernels give one after another."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch

import dsq
from dsq.functional import linear
from dsq.kernels.cpu import memory
from dsq.kernels.cpu.library import library
from dsq.kernels.dispatch import backend_for, use_backend
from dsq.ops import linear_passes
from dsq.ops.products import multiply
from tests.dsq.gradients import saving

NATIVE = backend_for(torch.device("cpu"))
STEP_BY_STEP = replace(NATIVE, linear=None)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
#: dtypes of an input, a weight and an upstream gradient, which has that of autocast
NARROW = [(FP16,) * 3, (FP32, FP32, BF16), (BF16, FP32, BF16), (FP32, FP32, FP16)]
one_call = pytest.mark.skipif(NATIVE.linear is None, reason="no units for matmuls here")


def step(quantizers, x, w, b, dy, needed=(0, 1)):
    """y, the stash, and the wanted gradients of x and w, in one pass each or kernel by kernel; under autocast if dy has
    another dtype than w."""
    torch.manual_seed(0)
    leaves = [t.detach().requires_grad_(i in needed) for i, t in enumerate((x, w))]
    with torch.autocast("cpu", dy.dtype, enabled=w.dtype != dy.dtype):
        y, saved = saving(linear, *leaves, b, quantizers)
        gradients = torch.autograd.grad(y, [leaves[i] for i in needed], dy)
    return [y, *(t for t in saved if t.dtype == torch.uint8), *gradients]


def check_one_call(quantizers, dtypes, step_by_step=lambda: use_backend(STEP_BY_STEP)):
    generator = torch.Generator().manual_seed(0)
    for (*leading, k), n in [((37, 24), 40), ((1,), 1), ((3, 19, 257), 70), ((0, 24), 3)]:
        shapes = (*leading, k), (n, k), (*leading, n), (n,)
        x, w, dy, b = (
            torch.randn(s, generator=generator).to(dtype) for s, dtype in zip(shapes, (*dtypes, dtypes[1]), strict=True)
        )
        for operands in ((x, w, b), (x.mT.contiguous().mT if leading else x, w.t().contiguous().t(), None)):
            actual = step(quantizers, *operands, dy)
            with step_by_step():
                expected = step(quantizers, *operands, dy)
            assert len(actual) == len(expected) == (5 if quantizers.q1.packs else 3)
            assert all(map(torch.equal, actual, expected))
            assert [(t.shape, t.dtype) for t in (actual[0], *actual[-2:])] == [(t.shape, t.dtype) for t in (dy, x, w)]
            if n > 1:
                for i in (0, 1):
                    assert torch.equal(step(quantizers, *operands, dy, needed=(i,))[-1], expected[i - 2])


@one_call
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(
    ("dtypes", "precision", "options"),
    [
        *product(
            [(FP32,) * 3],
            ["[2,2,2,16]", "[16,4,4,16]", "[9,4,8,10]", "[4,32,4,16]", "[32,4,4,16]"],
            [{"block_size": 5}, {"gemm": "float32"}, *({"format": name} for name in dsq.formats.FORMATS)],
        ),
        *product(
            [(BF16,) * 3, *NARROW],
            ["[4,4,4,16]", "[16,4,4,16]"],
            [{"format": "bfp"}, {"block_size": 5}, {"format": "snvint"}],
        ),
    ],
)
def test_one_call_gives_the_bits_of_one_kernel_after_another(dtypes, precision, options, rounding):
    check_one_call(dsq.DSQConfig(levels=precision, rounding=rounding, **options).at(0), dtypes)


@pytest.mark.parametrize("level", ["[-,4,-,-]", "[-,mxfp8,-,-]", "[-,mxfp4~,-,-]"])
@pytest.mark.parametrize("dtypes", [(FP32,) * 3, *NARROW])
def test_passes_of_unquantized_products_give_the_bits_of_one_product_after_another(dtypes, level, monkeypatch):
    @contextmanager
    def product_by_product():
        with monkeypatch.context() as patch:
            patch.setattr(linear_passes, "leaves_products", lambda matmuls: False)
            patch.setattr(linear_passes, "_plans", {})
            yield

    monkeypatch.setattr(linear_passes, "_plans", {})
    check_one_call(dsq.DSQConfig(levels=level).at(0), dtypes, product_by_product)


@pytest.mark.parametrize("kernel", ["bfloat16", "integer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_rounded_as_pytorch_rounds(kernel, dtype, monkeypatch):
    monkeypatch.setenv("DSQ_GEMM", kernel)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4099,), generator=generator).int()
    bits[::2] &= -(2**12)  # ties among them
    bits[:4] = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7F800000, 0x477FF000])
    bias = bits.view(torch.float32)
    with torch.autocast("cpu", dtype):
        y = linear(torch.zeros(3, 16), torch.zeros(4099, 16), bias, "[4,4,4,16]")
    assert torch.equal(y.isnan(), bias.isnan().expand(3, -1))
    assert torch.equal(
        y.nan_to_num(0.5, torch.inf, -torch.inf), bias.to(dtype).nan_to_num(0.5, torch.inf, -torch.inf).expand(3, -1)
    )


@pytest.mark.parametrize("precision", ["[4,4,4,16]", "[16,4,4,16]"])
def test_scratch_memory_too_large_to_keep(precision, monkeypatch):
    monkeypatch.setattr(memory, "MAX_REUSED_BYTES", 0)
    inputs = dsq.Quantizers.of(precision), torch.randn(4096, 64), torch.randn(512, 64), None, torch.randn(4096, 512)
    actual = step(*inputs)
    with use_backend(STEP_BY_STEP):
        assert all(map(torch.equal, actual, step(*inputs)))


@one_call
def test_passes_of_layers_are_one_call_where_the_library_has_one(monkeypatch):
    def refuse(*operands):
        raise AssertionError("a kernel of its own")

    x, w, dy = torch.randn(32, 48), torch.randn(64, 48), torch.randn(32, 64)
    takes_wide_codes = library().c.dsq_gemm_integer_fits(16, 4, 16)
    monkeypatch.setattr(linear_passes, "multiply", refuse)
    for precision in ("[4,4,4,8]", *(("[4,4,4,16]", "[16,4,4,16]") if takes_wide_codes else ())):
        step(dsq.Quantizers.of(precision), x, w, None, dy)
        with pytest.raises(AssertionError, match="of its own"):
            linear(x.double(), w.double(), None, precision)


def test_a_stochastic_layer_takes_no_plan_of_a_nearest_one():
    x, w, matmuls = torch.randn(37, 24), torch.randn(40, 24), dsq.Quantizers.of("[4,4,4,16]").linear_matmuls
    for seed in (None, 3):
        plan = linear_passes.plan_of(matmuls, x, w, None, seed is not None)
        y, _ = linear_passes.forward(plan, x, w, None, seed, stashing=False)
        assert torch.equal(y, multiply(matmuls.output, x, w, seed=seed))
