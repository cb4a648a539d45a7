"""Fused attention by the compiled kernels against its equations in float64."""

import math
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import dsq
from dsq.kernels.backend import AttentionOptions
from dsq.kernels.cpu.library import LIBRARY, library
from dsq.kernels.dispatch import backend_for
from tests.threads import threads

if not LIBRARY.exists():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)
CPU = backend_for(torch.device("cpu"))
attention, attention_gradients = CPU.attention, CPU.attention_gradients
KERNELS = library().usable(library().c.dsq_attention)
if not KERNELS:
    pytest.skip("PyTorch's own attention serves this machine", allow_module_level=True)


@pytest.fixture(params=KERNELS, autouse=True)
def kernels(request):
    """Use each of this machine's kernels in turn."""
    library().c.dsq_use_attention(KERNELS[request.param])
    yield
    library().c.dsq_use_attention(next(iter(KERNELS.values())))


#: batches, heads, queries, keys, features of a head
SHAPES = [(2, 3, 37, 53, 20), (1, 4, 128, 128, 64), (2, 2, 200, 200, 16), (1, 2, 33, 2500, 65), (3, 1, 1, 1, 1)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, spread: float = 1) -> list[Tensor]:
    """Return q, k, v and dy with heads side by side in memory, as projections do."""
    batches, heads, queries, keys, width = shape
    generator = torch.Generator().manual_seed(0)
    rows = (queries, keys, keys, queries)
    tensors = [torch.randn(batches, n, heads, width, generator=generator).transpose(1, 2) for n in rows]
    return [(spread * x).to(dtype).detach() for x in tensors]


def causal_mask(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys).tril().bool()


def equations(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor, visible: Tensor | None = None, factor=1) -> Tensor:
    """Return attention with ``biases`` added to the scores, to the ``visible`` keys, with weights times ``factor``."""
    scores = sum(biases, q @ k.mT / math.sqrt(q.shape[-1]))
    scores = scores if visible is None else scores.masked_fill(~visible, -math.inf)
    return (scores.softmax(-1).nan_to_num() * factor) @ v  # NaN: a row without a key


def results(function, *tensors: Tensor) -> list[Tensor]:
    """Return y, and the gradients of q, k and v."""
    *qkv, dy = (x.requires_grad_() for x in tensors)
    y = function(*qkv)
    return [y, *torch.autograd.grad(y, qkv, dy.detach())]


def ours(function, *tensors: Tensor) -> list[Tensor]:
    """Return the ``results`` of our kernels."""
    with dsq.fused_attention():
        return results(function, *tensors)


def test_the_kernels_answer_inside_and_pytorch_outside():
    q, k, v, _ = inputs((2, 4, 96, 96, 64))
    expected = F.scaled_dot_product_attention(q, k, v)
    thread_1, thread_2 = ExitStack(), ExitStack()  # of two threads, the first to begin may be the first to end
    for thread in (thread_1, thread_2):
        thread.enter_context(dsq.fused_attention())
    thread_1.close()
    with dsq.fused_attention():
        pass
    actual = F.scaled_dot_product_attention(q, k, v)
    thread_2.close()
    assert F.scaled_dot_product_attention(q, k, v).equal(expected)
    assert not actual.equal(expected)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (2, 1, 0)])
@pytest.mark.parametrize("expanded_dim", [None, 0, 1, 2])
def test_strides_are_pytorch_s(order, expanded_dim):  # compiled code relies on them
    q, k, v, dy = inputs((2, 4, 40, 40, 24))
    if expanded_dim is not None:
        q = q.narrow(expanded_dim, 0, 1)
    q = q.permute(*order, 3).contiguous().permute(*map(order.index, range(3)), 3).expand(2, 4, 40, 24)
    our_results, torch_results = (f(F.scaled_dot_product_attention, q, k, v, dy) for f in (ours, results))
    for actual, expected in zip(our_results, torch_results, strict=True):
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_backward_outside_the_context_is_pytorch_s():
    q, k, v, dy = inputs((2, 4, 96, 96, 64))
    qkv = [x.requires_grad_() for x in (q, k, v)]
    with dsq.fused_attention():
        y = F.scaled_dot_product_attention(*qkv)
    gradients = torch.autograd.grad(y, qkv, dy)
    for actual, expected in zip(gradients, ours(F.scaled_dot_product_attention, q, k, v, dy)[1:], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_the_number_of_threads_alters_no_bit():
    tensors = inputs((2, 3, 70, 70, 32))
    by_number = []
    for number in (1, 2, 6):
        with threads(number):
            by_number.append(ours(F.scaled_dot_product_attention, *tensors))
    for tensors in by_number[1:]:
        assert all(map(torch.equal, by_number[0], tensors))


def test_a_gradient_with_other_strides():
    q, k, v, dy = inputs((1, 2, 40, 40, 24))
    expected = ours(F.scaled_dot_product_attention, q, k, v, dy)
    actual = ours(F.scaled_dot_product_attention, q, k, v, dy.mT.contiguous().mT)
    assert all(map(torch.equal, expected, actual))
    ones = torch.ones(()).expand(q.shape)
    expected = ours(F.scaled_dot_product_attention, q, k, v, ones.contiguous())
    assert all(map(torch.equal, expected, ours(F.scaled_dot_product_attention, q, k, v, ones)))


@pytest.mark.parametrize("spread", [1e5, 1e9])  # scores of 1e10 and more, and differences as large
def test_large_scores(spread):
    tensors = inputs((1, 2, 40, 40, 24), spread=spread)
    y, *gradients = ours(F.scaled_dot_product_attention, *tensors)
    torch.testing.assert_close(y, equations(*tensors[:3]))
    assert all(x.isfinite().all() for x in gradients)


def padding(batches: int, queries: int, keys: int) -> Tensor:
    """Return a mask that hides all keys of the first sequence, and some keys at the end of the others."""
    visible = torch.arange(keys)[None] < torch.tensor([0, *range(keys, keys - batches + 1, -1)])[:, None]
    return visible[:, None, None]


MASKS = {
    "none": lambda *_: None,
    "padding": padding,
    "causal": lambda _, *sizes: causal_mask(*sizes),  # passed to the kernels as an option
    "the same for all": lambda _, *sizes: causal_mask(*sizes),
    "numbers": lambda _, queries, keys: torch.linspace(-3, 3, queries * keys).view(1, 1, queries, keys),
    "the lowest number": lambda *sizes: (~padding(*sizes)).float() * torch.finfo(torch.float32).min,
    "a number a query": lambda _, queries, keys: torch.linspace(-3, 3, queries).view(queries, 1),
}


@pytest.mark.parametrize("dropout, spread", [(0.0, 1), (0.0, 8), (0.4, 1)])  # with 8 most weights are close to 0
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 5e-3)], ids=str)
def test_result_and_gradients_are_those_of_the_equations(dtype, tolerance, shape, kind, dropout, spread):
    batches, heads, queries, keys, _ = shape
    mask = MASKS[kind](batches, queries, keys)
    causal = kind == "causal"
    noise = torch.empty(batches, heads, queries, keys, dtype=torch.uint8).bernoulli_(1 - dropout)
    q, k, v, dy = inputs(shape, dtype, spread)
    draw = (lambda: noise) if dropout else None
    options = q, k, v, AttentionOptions(causal, mask=None if causal else mask, dropout=dropout, noise=draw)
    learned = mask is not None and mask.dtype != torch.bool
    our_results = [attention(*options), *attention_gradients(dy, *options, learned)]

    visible = mask if mask is not None and not learned else None
    exact_attention = partial(equations, visible=visible, factor=noise / (1 - dropout))
    tensors = q, k, v, *((mask,) if learned else ()), dy
    exact_results = results(exact_attention, *(x.double() for x in tensors))
    for actual, exact in zip(our_results, exact_results, strict=True):
        expected = exact.nan_to_num()
        # errors grow with the scores; dq and dk of a single key are 0, except for rounding
        assert (actual - expected).norm() <= tolerance * spread**2 * max(expected.norm(), exact_results[0].norm())
    assert [x.dtype for x in our_results[:4]] == [dtype] * 4


@pytest.mark.parametrize("change", [lambda x: x[:, :1], lambda x: x[:0], lambda x: x.half()])
def test_a_gradient_of_another_shape_or_dtype(change):
    q, k, v, dy = inputs((1, 2, 40, 40, 24))
    with pytest.raises(ValueError, match=r"the gradient of attention must be torch\.float32"):
        attention_gradients(change(dy), q, k, v, AttentionOptions())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_reaches_its_row_and_no_other(value):
    q, k, v, _ = inputs((1, 2, 40, 40, 24))
    q[0, 1, 7, 3] = value
    with dsq.fused_attention():
        y = F.scaled_dot_product_attention(q, k, v)
    expected = torch.zeros(y.shape[:3], dtype=torch.bool)
    expected[0, 1, 7] = True
    assert torch.equal(y.isnan().any(-1), expected)


def test_pytorch_serves_arguments_that_the_kernels_do_not_support():
    qkv_dy = inputs((2, 4, 40, 40, 24))
    q, k, v, dy = qkv_dy
    cases = {
        "a mask": (qkv_dy, {"attn_mask": causal_mask(40, 40)}),
        "a scale below 0": (qkv_dy, {"scale": -30.0}),
        "float64": ([x.double() for x in qkv_dy], {}),
        "columns apart": ([x.mT.contiguous().mT for x in qkv_dy], {}),
        "no key": ([q, k[:, :, :0], v[:, :, :0], dy], {}),
    }
    for tensors, options in cases.values():
        attention = partial(F.scaled_dot_product_attention, **options)
        pairs = zip(ours(attention, *tensors), results(attention, *tensors), strict=True)
        assert all(actual.equal(expected) or expected.isnan().all() for actual, expected in pairs)
    for qkv in ((q[0], k[0], v[0]), (q, k[:, :3], v[:, :3]), (q.double(), k.double(), v.double())):
        assert attention_gradients(dy, *qkv, AttentionOptions()) is None
