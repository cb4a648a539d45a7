"""Products: the equations in float64, the stash in bytes; attention beside PyTorch."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import dsq
from dsq.ops.products import attention, matmul_of_activations
from dsq.quantizers import Quantizers
from tests.dsq.gradients import error, same, saving, step
from tests.dsq.stash.census import peak_bytes


@pytest.mark.parametrize("precision", ["[4,4,4,16]", "[16,4,4,16]", "[4,32,4,16]"])
def test_a_mode_sees_products_as_operators_of_the_same_bits_and_counts_them(precision):
    net = dsq.convert(torch.nn.Linear(64, 32), dsq.DSQConfig(levels=precision))
    x = torch.randn(2, 48, 64, requires_grad=True)

    expected = step(net, x)
    with FlopCounterMode(display=False) as counter:
        assert same(step(net, x), expected)
    assert counter.get_total_flops() == 3 * 2 * 96 * 64 * 32


def matmuls_at(q0, q1, q2):
    return Quantizers(q0, q1, q2, q3=q2).activation_matmuls


def quantized(x, fmt, axis):
    return dsq.quantize(x, fmt, axis).double()


def test_forward_and_gradients_are_the_equations():
    q0, q1, q2 = dsq.BFP(8), dsq.BFP(4), dsq.BFP(6)
    a, b = torch.randn(48, 32, requires_grad=True), torch.randn(32, 80, requires_grad=True)
    dy = torch.randn(48, 80)
    y, saved_tensors = saving(matmul_of_activations, a, b, matmuls_at(q0, q1, q2))
    y.backward(dy)
    expected = quantized(a, q0, 1) @ quantized(b, q0, 0)
    da = quantized(dy, q2, 1) @ quantized(b, q1, 1).t()
    db = quantized(a, q1, 0).t() @ quantized(dy, q2, 0)
    for result, exact in ((y, expected), (a.grad, da), (b.grad, db)):
        torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-5)
    assert sum(x.nbytes for x in saved_tensors) == (48 * 32 + 32 * 80) * 4.5 / 8


@pytest.mark.parametrize("shape", [(2, 1, 32, 48), (32, 48)])
def test_an_operand_that_serves_several_matrices_is_stashed_once(shape):
    a, b = torch.randn(2, 3, 16, 32, requires_grad=True), torch.randn(shape, requires_grad=True)
    matmuls = matmuls_at(dsq.BFP(8), dsq.BFP(4), dsq.BFP(6))
    y, saved_tensors = saving(matmul_of_activations, a, b, matmuls)
    dy = torch.randn(y.shape)
    repeated = matmul_of_activations(a, b.expand(2, 3, 32, 48), matmuls)
    assert torch.equal(y, repeated)
    da, db = torch.autograd.grad(y, (a, b), dy)
    expected_da, expected_db = torch.autograd.grad(repeated, (a, b), dy)
    assert torch.equal(da, expected_da)
    torch.testing.assert_close(db, expected_db, rtol=1e-5, atol=1e-5)
    assert sum(x.nbytes for x in saved_tensors) == (a.numel() + b.numel()) * 4.5 / 8


def test_under_autocast_operands_are_those_of_the_tensors_themselves():
    """Weights of a softmax are float32 there, values bfloat16."""
    a, b = torch.rand(3, 24, 32, requires_grad=True), torch.randn(3, 32, 16).bfloat16().requires_grad_()
    matmuls = matmuls_at(dsq.BFP(8), dsq.BFP(4), dsq.BFP(6))
    with torch.autocast("cpu", torch.bfloat16):
        y = matmul_of_activations(a, b, matmuls)
        assert torch.equal(matmul_of_activations(a.detach(), b.detach(), matmuls), y)
    y.sum().backward()
    assert (y.dtype, a.grad.dtype, b.grad.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    expected = quantized(a, dsq.BFP(8), -1) @ quantized(b, dsq.BFP(8), -2)
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-3)


FULL = matmuls_at(*(dsq.Identity(),) * 3)


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
    operands, dy = inputs(key_heads=key_heads)
    results = []
    for function in (F.scaled_dot_product_attention, lambda *x, **o: attention(*x, FULL, **o)[0]):
        y = function(*operands, enable_gqa=key_heads != 4, **masks)
        results.append((y, *torch.autograd.grad(y, operands, dy)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_a_mask_of_float32_serves_bfloat16():
    operands = [x.detach().bfloat16() for x in inputs()[0]]
    y = attention(*operands, FULL, MASKS["float"]["attn_mask"])[0]
    assert y.dtype == torch.bfloat16
    expected = F.scaled_dot_product_attention(*operands, MASKS["float"]["attn_mask"].bfloat16())
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("masks", [{}, {"is_causal": True}], ids=["none", "causal"])
def test_attention_and_its_gradients_are_two_products_with_a_softmax_between(masks):
    matmuls, (operands, dy) = matmuls_at(dsq.BFP(8), dsq.BFP(4), dsq.BFP(6)), inputs()
    q, k, v = operands
    scores = matmul_of_activations(q, k.mT, matmuls) / math.sqrt(16)
    if masks:
        scores = scores.masked_fill(~torch.ones(24, 40, dtype=torch.bool).tril(), -math.inf)
    weights = scores.softmax(-1)
    y, p = attention(q, k, v, matmuls, **masks)
    torch.testing.assert_close(p, weights, rtol=1e-5, atol=1e-6)
    assert error(y, matmul_of_activations(p, v, matmuls)) < 1e-6
    expected = matmul_of_activations(weights, v, matmuls)
    for actual, exact in zip(*(torch.autograd.grad(result, operands, dy) for result in (y, expected)), strict=True):
        assert error(actual, exact) < 2e-3  # a rounding of the scores' gradient may fall to the other side


def saved_bytes(operands, **options):
    """Bytes kept of packed operands, and of all else."""
    _, saved_tensors = saving(partial(attention, **options), *operands, matmuls_at(*(dsq.BFP(4),) * 3))
    packed = sum(x.nbytes for x in saved_tensors if x.dtype == torch.uint8)
    return packed, sum(x.nbytes for x in saved_tensors) - packed


@pytest.mark.parametrize("key_heads", [4, 2])
def test_attentions_operands_are_stashed_packed(key_heads):
    """Keys and values once, though several heads share them."""
    (q, k, v), _ = inputs(key_heads=key_heads, length=48, keys=48)
    packed, _ = saved_bytes((q, k, v), enable_gqa=key_heads != 4)
    assert packed == (q.numel() + k.numel() + v.numel() + 2 * 4 * 48 * 48) * 4.5 / 8


@pytest.mark.parametrize("options", [*MASKS.values(), {"dropout_p": 0.1}], ids=[*MASKS, "dropout"])
def test_the_rest_that_is_kept_is_the_weights_and_a_byte_for_each_that_may_be_dropped(options):
    assert saved_bytes(inputs()[0], **options)[1] == (4 + ("dropout_p" in options)) * (2 * 4 * 24 * 40)


def test_the_peak_is_three_tensors_of_the_weights_size():
    """Weights, their gradient and that of the scores; queries, keys and values are small here."""
    q, k, v = (torch.randn(2, 2, 128, 8, requires_grad=True) for _ in range(3))
    peak = peak_bytes(lambda: attention(q, k, v, matmuls_at(*(dsq.BFP(4),) * 3))[0])
    assert peak < 3.5 * 4 * (2 * 2 * 128 * 128)


def test_dropout_drops():
    _, weights = attention(*inputs()[0], FULL, dropout_p=0.5)
    assert 0.4 < (weights == 0).float().mean() < 0.6


def test_both_products_of_attention_have_random_numbers_of_their_own():
    (q, k, v), _ = inputs()
    matmuls = matmuls_at(*(dsq.BFP(4),) * 3)
    y, weights = attention(q, k, v, matmuls, seed=3)
    assert not torch.equal(y, matmul_of_activations(weights, v, matmuls, seed=3))


def test_the_gradient_of_a_matrix_takes_its_own_memory_not_that_of_the_batch():
    a, b = torch.randn(32, 8, 64, requires_grad=True), torch.randn(64, 128, requires_grad=True)
    matmuls = matmuls_at(*(dsq.BFP(4),) * 3)
    assert peak_bytes(lambda: matmul_of_activations(a, b, matmuls)) < a.shape[0] * b.nbytes / 2
