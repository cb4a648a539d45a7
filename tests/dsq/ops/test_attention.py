"""Quantised attention against its equations in float64, and at full width against PyTorch's."""

import math

import pytest
import torch
from torch.nn import functional as F

import dsq
from dsq.ops.products import attention, product_matmuls

FULL = product_matmuls(*(dsq.BFP(32),) * 3)


def inputs(heads=4, key_heads=4, length=24, keys=40):
    torch.manual_seed(0)
    shapes = (2, heads, length, 16), (2, key_heads, keys, 16), (2, key_heads, keys, 32)
    return [torch.randn(*s, requires_grad=True) for s in shapes], torch.randn(2, heads, length, 32)


MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "padding": {"attn_mask": (torch.arange(40) < torch.tensor([[[[40]]], [[[25]]]]))},
    "float": {"attn_mask": torch.randn(24, 40, generator=torch.Generator().manual_seed(1))},
    "nothing to attend": {"attn_mask": (torch.arange(24) > 0)[:, None].expand(24, 40)},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("key_heads", [4, 2])
def test_at_full_width_it_is_pytorch_s(masks, key_heads):
    given, dy = inputs(key_heads=key_heads)
    results = []
    for function in (F.scaled_dot_product_attention, lambda *x, **o: attention(*x, FULL, **o)[0]):
        y = function(*given, enable_gqa=key_heads != 4, **masks)
        results.append((y, *torch.autograd.grad(y, given, dy)))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def quantised(x, fmt, axis):
    return dsq.quantize(x.detach().float(), fmt, axis).double()


@pytest.mark.parametrize("masks", [{}, {"is_causal": True}], ids=["none", "causal"])
def test_forward_and_gradients_are_the_equations(masks):
    formats = q0, q1, q2 = dsq.BFP(8), dsq.BFP(4), dsq.BFP(6)
    (q, k, v), dy = inputs()
    y, p = attention(q, k, v, product_matmuls(*formats), **masks)
    found = torch.autograd.grad(y, (q, k, v), dy)
    scores = quantised(q, q0, -1) @ quantised(k, q0, -1).mT / math.sqrt(16)
    if masks:
        scores = scores.masked_fill(~torch.ones(24, 40, dtype=torch.bool).tril(), -math.inf)
    weights = scores.softmax(-1)
    torch.testing.assert_close(p.double(), weights, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y.double(), quantised(p, q0, -1) @ quantised(v, q0, -2), rtol=1e-5, atol=1e-5)
    dp = quantised(dy, q2, -1) @ quantised(v, q1, -1).mT
    dv = quantised(p, q1, -2).mT @ quantised(dy, q2, -2)
    ds = (p.double() * (dp - (dp * p.double()).sum(-1, keepdim=True)) / math.sqrt(16)).float()
    dq = quantised(ds, q2, -1) @ quantised(k, q1, -2)  # k.mT is b (D, S): its gradient's boxes run along S
    dk = (quantised(q, q1, -2).mT @ quantised(ds, q2, -2)).mT
    for ours, exact in zip(found, (dq, dk, dv), strict=True):
        error = (ours.double() - exact).norm() / exact.norm()  # a rounding of ds may fall to the other side
        assert error < 2e-3


def kept_bytes(given, **options):
    """Of packed operands, and of all else."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        attention(*given, product_matmuls(*(dsq.BFP(4),) * 3), **options)
    packed = sum(x.nbytes for x in kept if x.dtype == torch.uint8)
    return packed, sum(x.nbytes for x in kept) - packed


@pytest.mark.parametrize("key_heads", [4, 2])
def test_its_operands_are_stashed_packed(key_heads):
    """Keys and values once, though several heads share them."""
    (q, k, v), _ = inputs(key_heads=key_heads, length=48, keys=48)
    packed, _ = kept_bytes((q, k, v), enable_gqa=key_heads != 4)
    assert packed == (q.numel() + k.numel() + v.numel() + 2 * 4 * 48 * 48) * 4.5 / 8


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_of_the_rest_the_weights_alone_are_kept(masks):
    given, _ = inputs()
    assert kept_bytes(given, **masks)[1] == 4 * (2 * 4 * 24 * 40)


def test_dropout_keeps_a_byte_a_weight():
    given, _ = inputs()
    assert kept_bytes(given, dropout_p=0.1)[1] == (4 + 1) * (2 * 4 * 24 * 40)


def test_the_peak_is_three_tensors_of_the_weights_size():
    """Weights, their gradient and that of the scores; queries, keys and values are small here."""
    q, k, v = (torch.randn(2, 2, 128, 8, requires_grad=True) for _ in range(3))
    peak = dsq.stash.measure(lambda: attention(q, k, v, product_matmuls(*(dsq.BFP(4),) * 3))[0].sum(), backward=True)
    assert peak.peak_bytes < 3.5 * 4 * (2 * 2 * 128 * 128)


def test_dropout_drops_and_both_masks_are_refused():
    (q, k, v), _ = inputs()
    _, weights = attention(q, k, v, FULL, dropout_p=0.5)
    assert 0.4 < (weights == 0).float().mean() < 0.6
    with pytest.raises(ValueError, match="is_causal and attn_mask were both given"):
        attention(q, k, v, FULL, attn_mask=torch.ones(24, 40), is_causal=True)
