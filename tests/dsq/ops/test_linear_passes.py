"""A layer's passes in one call each give what the kernels give one after another."""

from dataclasses import replace

import pytest
import torch

import dsq
from dsq.kernels.backend import Dtypes
from dsq.kernels.cpu import memory
from dsq.kernels.cpu.library import library
from dsq.kernels.dispatch import backend_for, use_backend
from dsq.ops import linear_passes as passes

NATIVE = backend_for(torch.device("cpu"))
STEP_BY_STEP = replace(NATIVE, linear=None)
SAME = Dtypes(*(torch.float32,) * 3)


@pytest.mark.skipif(NATIVE.linear is None, reason="no units for matmuls here")
@pytest.mark.parametrize("seed", [None, 2**63 + 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"box": 5},
        {"format": "fixed"},
        {"format": "snvint"},
        {"format": "sbfp"},
        {"units": "float32"},
        {"box_axis": "last"},
    ],
)
@pytest.mark.parametrize("precision", ["[2,2,2,16]", "[16,4,4,16]", "[9,4,8,10]", "[4,32,4,16]", "[32,4,4,16]"])
def test_one_call_gives_the_bits_of_one_kernel_after_another(precision, options, seed):
    check_one_call(dsq.DSQConfig(levels=precision, **options).at(0).matmuls, SAME, seed)


@pytest.mark.skipif(NATIVE.linear is None, reason="no units for matmuls here")
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("options", [{}, {"box": 5}, {"format": "snvint"}, {"format": "sbfp"}])
@pytest.mark.parametrize("precision", ["[4,4,4,16]", "[16,4,4,16]"])
@pytest.mark.parametrize(
    "dtypes",
    [
        Dtypes(torch.bfloat16, torch.bfloat16, torch.bfloat16),
        Dtypes(torch.float16, torch.float16, torch.float16),
        Dtypes(torch.float32, torch.float32, torch.bfloat16),
        Dtypes(torch.bfloat16, torch.float32, torch.bfloat16),
        Dtypes(torch.float32, torch.float32, torch.float16),
    ],
)
def test_so_it_does_in_narrow_dtypes_and_under_autocast(dtypes, precision, options, seed):
    with torch.autocast("cpu", dtypes.y, enabled=dtypes.w != dtypes.y):
        check_one_call(dsq.DSQConfig(levels=precision, **options).at(0).matmuls, dtypes, seed)


def check_one_call(matmuls, dtypes, seed):
    generator = torch.Generator().manual_seed(0)
    for (*leading, k), n in [((37, 24), 40), ((1,), 1), ((3, 19, 257), 70), ((0, 24), 3)]:
        shapes = (*leading, k), (n, k), (*leading, n), (n,)
        x, w, dy, b = (
            torch.randn(s, generator=generator).to(dtype) for s, dtype in zip(shapes, (*dtypes, dtypes.w), strict=True)
        )
        for operands in ((x, w, b), (x.mT.contiguous().mT if leading else x, w.t().contiguous().t(), None)):
            packing = matmuls.stash.format is not None
            y, x1 = passes.forward(matmuls, *operands, seed, packing)
            gradients = passes.backward(matmuls, dtypes, dy, w, x1 if packing else x, seed)
            assert passes.backward(matmuls, dtypes, dy, None, None, seed) == (None, None)
            with use_backend(STEP_BY_STEP):
                expected_y, expected_x1 = passes.forward(matmuls, *operands, seed, packing)
                expected = passes.backward(matmuls, dtypes, dy, w, expected_x1 if packing else x, seed)
            assert torch.equal(y, expected_y)
            assert (y.shape, y.dtype) == (dy.shape, dy.dtype)
            if packing:
                assert torch.equal(x1.codes, expected_x1.codes)
                assert torch.equal(x1.scales, expected_x1.scales)
                assert x1.shape == expected_x1.shape
            assert all(torch.equal(a, e) for a, e in zip(gradients, expected, strict=True))
            assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype), (w.shape, w.dtype)]
            if packing and n > 1:
                assert torch.equal(passes.backward(matmuls, dtypes, dy, w, None, seed)[0], expected[0])
                assert torch.equal(passes.backward(matmuls, dtypes, dy, None, x1, seed)[1], expected[1])


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
        y, _ = passes.forward(
            dsq.Quantizers.of("[4,4,4,16]").matmuls, torch.zeros(3, 16), torch.zeros(4099, 16), bias, None, False
        )
    assert torch.equal(y.isnan(), bias.isnan().expand(3, -1))
    assert torch.equal(
        y.nan_to_num(0.5, torch.inf, -torch.inf), bias.to(dtype).nan_to_num(0.5, torch.inf, -torch.inf).expand(3, -1)
    )


@pytest.mark.parametrize("precision", ["[4,4,4,16]", "[16,4,4,16]"])
def test_scratch_memory_too_large_to_keep(precision, monkeypatch):
    monkeypatch.setattr(memory, "KEPT", 0)
    matmuls = dsq.Quantizers.of(precision).matmuls
    x, w, dy = torch.randn(4096, 64), torch.randn(512, 64), torch.randn(4096, 512)
    y, x1 = passes.forward(matmuls, x, w, None, None, stashing=True)
    got = y, *passes.backward(matmuls, SAME, dy, w, x1, None)
    with use_backend(STEP_BY_STEP):
        y, x1 = passes.forward(matmuls, x, w, None, None, stashing=True)
        assert all(map(torch.equal, got, (y, *passes.backward(matmuls, SAME, dy, w, x1, None))))


@pytest.mark.parametrize("precision", ["[4,4,4,16]", "[16,4,4,16]"])
def test_tensors_whose_memory_is_not_their_values(precision):
    matmuls = dsq.Quantizers.of(precision).matmuls
    x, w, b, dy = (torch.randn(*s) for s in ((8, 32), (4, 32), (4,), (8, 4)))
    y, x1 = passes.forward(matmuls, x, w, b, None, stashing=True)
    expected = y, *passes.backward(matmuls, SAME, dy, w, x1, None)
    for negated in range(4):
        lazily = [torch._neg_view(-t) if i == negated else t for i, t in enumerate((x, w, b, dy))]
        y, x1 = passes.forward(matmuls, *lazily[:3], None, stashing=True)
        got = y, *passes.backward(matmuls, SAME, lazily[3], lazily[1], x1, None)
        assert all(map(torch.equal, got, expected))


@pytest.mark.skipif(NATIVE.linear is None, reason="no units for matmuls here")
def test_which_passes_are_one_call(monkeypatch):
    def refuse(*operands):
        raise AssertionError("a kernel of its own")

    x, w = torch.randn(32, 48), torch.randn(64, 48)
    takes_wide_codes = library().c.dsq_gemm_integer_fits(16, 4, 16)
    for precision in ("[4,4,4,8]", *(("[4,4,4,16]", "[16,4,4,16]") if takes_wide_codes else ())):
        matmuls = dsq.Quantizers.of(precision).matmuls
        with monkeypatch.context() as m:
            m.setattr(passes, "multiply", refuse)
            y, x1 = passes.forward(matmuls, x, w, None, None, stashing=True)
            passes.backward(matmuls, SAME, y, w, x1, None)
            with pytest.raises(AssertionError, match="of its own"):
                passes.forward(matmuls, x.double(), w.double(), None, None, stashing=False)
