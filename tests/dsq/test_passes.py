"""A layer's passes in one call each give what the kernels give one after another."""

from dataclasses import replace

import pytest
import torch
from dsq.kernels import native_layer

import dsq
from dsq import kernels, passes

NATIVE = kernels.backend_for(torch.device("cpu"))
STEP_BY_STEP = replace(NATIVE, layer=None)


@pytest.mark.skipif(NATIVE.layer is None, reason="no units for products here")
@pytest.mark.parametrize("seed", [None, 2**63 + 5])
@pytest.mark.parametrize("options", [{}, {"box": 5}, {"format": "fixed"}, {"units": "float32"}, {"box_axis": "last"}])
@pytest.mark.parametrize("precision", ["[2,2,2,16]", "[16,4,4,16]", "[9,4,8,10]", "[4,32,4,16]", "[32,4,4,16]"])
def test_one_call_gives_the_bits_of_one_kernel_after_another(precision, options, seed):
    products = dsq.DSQConfig(levels=precision, **options).at(0).products
    generator = torch.Generator().manual_seed(0)
    for (*leading, k), n in [((37, 24), 40), ((1,), 1), ((3, 19, 257), 70), ((0, 24), 3)]:
        x, w, b = (torch.randn(s, generator=generator) for s in ((*leading, k), (n, k), (n,)))
        dy = torch.randn(*leading, n, generator=generator)
        for operands in ((x, w, b), (x.mT.contiguous().mT if leading else x, w.t().contiguous().t(), None)):
            packing = products.stash.grid is not None
            y, x1 = passes.forward(products, *operands, seed, packing)
            gradients = passes.backward(products, dy, w, x1 if packing else x, seed)
            assert passes.backward(products, dy, None, None, seed) == (None, None)
            with kernels.use_backend(STEP_BY_STEP):
                expected_y, expected_x1 = passes.forward(products, *operands, seed, packing)
                expected = passes.backward(products, dy, w, expected_x1 if packing else x, seed)
            assert torch.equal(y, expected_y)
            assert y.shape == dy.shape
            if packing:
                assert torch.equal(x1.codes, expected_x1.codes)
                assert torch.equal(x1.exponents, expected_x1.exponents)
                assert x1.shape == expected_x1.shape
            assert all(torch.equal(a, e) for a, e in zip(gradients, expected, strict=True))
            assert [g.shape for g in gradients] == [x.shape, w.shape]
            if packing and n > 1:
                assert torch.equal(passes.backward(products, dy, w, None, seed)[0], expected[0])
                assert torch.equal(passes.backward(products, dy, None, x1, seed)[1], expected[1])


@pytest.mark.parametrize("precision", ["[4,4,4,16]", "[16,4,4,16]"])
def test_scratch_memory_too_large_to_keep(precision, monkeypatch):
    monkeypatch.setattr(native_layer, "_KEPT", 0)
    products = dsq.Quantizers.of(precision).products
    x, w, dy = torch.randn(4096, 64), torch.randn(512, 64), torch.randn(4096, 512)
    y, x1 = passes.forward(products, x, w, None, None, packing=True)
    got = y, *passes.backward(products, dy, w, x1, None)
    with kernels.use_backend(STEP_BY_STEP):
        y, x1 = passes.forward(products, x, w, None, None, packing=True)
        assert all(map(torch.equal, got, (y, *passes.backward(products, dy, w, x1, None))))


@pytest.mark.parametrize("precision", ["[4,4,4,16]", "[16,4,4,16]"])
def test_tensors_whose_memory_is_not_their_values(precision):
    products = dsq.Quantizers.of(precision).products
    x, w, b, dy = (torch.randn(*s) for s in ((8, 32), (4, 32), (4,), (8, 4)))
    y, x1 = passes.forward(products, x, w, b, None, packing=True)
    expected = y, *passes.backward(products, dy, w, x1, None)
    for negated in range(4):
        lazily = [torch._neg_view(-t) if i == negated else t for i, t in enumerate((x, w, b, dy))]
        y, x1 = passes.forward(products, *lazily[:3], None, packing=True)
        got = y, *passes.backward(products, lazily[3], lazily[1], x1, None)
        assert all(map(torch.equal, got, expected))


@pytest.mark.skipif(NATIVE.layer is None, reason="no units for products here")
def test_which_passes_are_one_call(monkeypatch):
    def refuse(*operands):
        raise AssertionError("a kernel of its own")

    x, w = torch.randn(32, 48), torch.randn(64, 48)
    for precision in ("[4,4,4,16]", "[16,4,4,16]"):
        products = dsq.Quantizers.of(precision).products
        with monkeypatch.context() as m:
            m.setattr(passes, "multiply", refuse)
            y, x1 = passes.forward(products, x, w, None, None, packing=True)
            passes.backward(products, y, w, x1, None)
            with pytest.raises(AssertionError, match="of its own"):
                passes.forward(products, x.double(), w.double(), None, None, packing=False)
