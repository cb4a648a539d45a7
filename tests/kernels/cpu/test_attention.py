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
    """Each of this machine's in turn."""
    library().c.dsq_use_attention(KERNELS[request.param])
    yield
    library().c.dsq_use_attention(next(iter(KERNELS.values())))


#: batches, heads, queries, keys, features of a head
SHAPES = [(2, 3, 37, 53, 20), (1, 4, 128, 128, 64), (2, 2, 200, 200, 16), (1, 2, 33, 2500, 65), (3, 1, 1, 1, 1)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, spread: float = 1) -> list[Tensor]:
    """q, k, v and dy, as projections give them: heads side by side in memory."""
    batches, heads, queries, keys, width = shape
    generator = torch.Generator().manual_seed(0)
    rows = (queries, keys, keys, queries)
    made = [torch.randn(batches, n, heads, width, generator=generator).transpose(1, 2) for n in rows]
    return [(spread * x).to(dtype).detach() for x in made]


def causal_mask(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys).tril().bool()


def equations(q: Tensor, k: Tensor, v: Tensor, *added: Tensor, seen: Tensor | None = None, kept=1) -> Tensor:
    """Attention with what is ``added`` to the scores, of the keys that are ``seen``, with weights times ``kept``."""
    scores = sum(added, q @ k.mT / math.sqrt(q.shape[-1]))
    scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
    return (scores.softmax(-1).nan_to_num() * kept) @ v  # NaN: a row without a key


def results(function, *given: Tensor) -> list[Tensor]:
    """y, and the gradients of q, k and v."""
    *qkv, dy = (x.requires_grad_() for x in given)
    y = function(*qkv)
    return [y, *torch.autograd.grad(y, qkv, dy.detach())]


def ours(function, *given: Tensor) -> list[Tensor]:
    """Call ``results`` while the kernels serve."""
    with dsq.fused_attention():
        return results(function, *given)


def test_the_kernels_answer_inside_and_pytorch_outside():
    q, k, v, _ = inputs((2, 4, 96, 96, 64))
    before = F.scaled_dot_product_attention(q, k, v)
    first, second = ExitStack(), ExitStack()  # of two threads, say: the first to begin may be the first to end
    for context in (first, second):
        context.enter_context(dsq.fused_attention())
    first.close()
    with dsq.fused_attention():
        pass
    inside = F.scaled_dot_product_attention(q, k, v)
    second.close()
    assert F.scaled_dot_product_attention(q, k, v).equal(before)
    assert not inside.equal(before)
    torch.testing.assert_close(inside, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (2, 1, 0)])
@pytest.mark.parametrize("one", [None, 0, 1, 2])
def test_strides_are_pytorch_s(order, one):  # compiled code relies on them
    q, k, v, dy = inputs((2, 4, 40, 40, 24))
    if one is not None:
        q = q.narrow(one, 0, 1)
    q = q.permute(*order, 3).contiguous().permute(*map(order.index, range(3)), 3).expand(2, 4, 40, 24)
    found, expected = (f(F.scaled_dot_product_attention, q, k, v, dy) for f in (ours, results))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_backward_that_comes_after_is_pytorch_s():
    q, k, v, dy = inputs((2, 4, 96, 96, 64))
    qkv = [x.requires_grad_() for x in (q, k, v)]
    with dsq.fused_attention():
        y = F.scaled_dot_product_attention(*qkv)
    after = torch.autograd.grad(y, qkv, dy)
    for one, other in zip(after, ours(F.scaled_dot_product_attention, q, k, v, dy)[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_number_of_threads_alters_no_bit():
    given, found = inputs((2, 3, 70, 70, 32)), []
    for number in (1, 2, 6):
        with threads(number):
            found.append(ours(F.scaled_dot_product_attention, *given))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_a_gradient_with_strides_of_its_own():
    q, k, v, dy = inputs((1, 2, 40, 40, 24))
    expected = ours(F.scaled_dot_product_attention, q, k, v, dy)
    found = ours(F.scaled_dot_product_attention, q, k, v, dy.mT.contiguous().mT)
    assert all(map(torch.equal, expected, found))
    one = torch.ones(()).expand(q.shape)
    expected = ours(F.scaled_dot_product_attention, q, k, v, one.contiguous())
    assert all(map(torch.equal, expected, ours(F.scaled_dot_product_attention, q, k, v, one)))


@pytest.mark.parametrize("spread", [1e5, 1e9])  # scores of 1e10 and more, which differ by as much
def test_large_scores(spread):
    given = inputs((1, 2, 40, 40, 24), spread=spread)
    y, *gradients = ours(F.scaled_dot_product_attention, *given)
    torch.testing.assert_close(y, equations(*given[:3]))
    assert all(x.isfinite().all() for x in gradients)


def padding(batches: int, queries: int, keys: int) -> Tensor:
    """Nothing of the first sequence is seen, and of the others all but some keys at the end."""
    seen = torch.arange(keys)[None] < torch.tensor([0, *range(keys, keys - batches + 1, -1)])[:, None]
    return seen[:, None, None]


MASKS = {
    "none": lambda *_: None,
    "padding": padding,
    "causal": lambda _, *sizes: causal_mask(*sizes),  # which the kernels are told of, in place of a mask
    "the same for all": lambda _, *sizes: causal_mask(*sizes),
    "numbers": lambda _, queries, keys: torch.linspace(-3, 3, queries * keys).view(1, 1, queries, keys),
    "the lowest number": lambda *sizes: (~padding(*sizes)).float() * torch.finfo(torch.float32).min,
    "a number a query": lambda _, queries, keys: torch.linspace(-3, 3, queries).view(queries, 1),
}


@pytest.mark.parametrize("dropout, spread", [(0.0, 1), (0.0, 8), (0.4, 1)])  # with 8 most weights are next to 0
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 5e-3)], ids=str)
def test_result_and_gradients_are_those_of_the_equations(dtype, tolerance, shape, kind, dropout, spread):
    batches, heads, queries, keys, _ = shape
    given, mask, causal = inputs(shape, dtype, spread), MASKS[kind](batches, queries, keys), kind == "causal"
    noise = torch.empty(batches, heads, queries, keys, dtype=torch.uint8).bernoulli_(1 - dropout)
    q, k, v, dy = given
    draw = (lambda: noise) if dropout else None
    options = q, k, v, AttentionOptions(causal, mask=None if causal else mask, dropout=dropout, noise=draw)
    learned = mask is not None and mask.dtype != torch.bool
    found = [attention(*options), *attention_gradients(dy, *options, learned)]

    seen, kept = mask if mask is not None and not learned else None, noise / (1 - dropout)
    given = q, k, v, *((mask,) if learned else ()), dy
    expected = results(partial(equations, seen=seen, kept=kept), *(x.double() for x in given))
    for one, other in zip(found, expected, strict=True):
        other = other.nan_to_num()
        # errors grow with the scores; dq and dk of a single key are 0, but for rounding
        assert (one - other).norm() <= tolerance * spread**2 * max(other.norm(), expected[0].norm())
    assert [x.dtype for x in found[:4]] == [dtype] * 4


@pytest.mark.parametrize("change", [lambda x: x[:, :1], lambda x: x[:0], lambda x: x.half()])
def test_a_gradient_of_another_shape_or_dtype(change):
    q, k, v, dy = inputs((1, 2, 40, 40, 24))
    with pytest.raises(ValueError, match=r"the gradient of attention must be torch\.float32"):
        attention_gradients(change(dy), q, k, v, AttentionOptions())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_its_row_and_no_other(bad):
    q, k, v, _ = inputs((1, 2, 40, 40, 24))
    q[0, 1, 7, 3] = bad
    with dsq.fused_attention():
        y = F.scaled_dot_product_attention(q, k, v)
    broken = torch.zeros(y.shape[:3], dtype=torch.bool)
    broken[0, 1, 7] = True
    assert torch.equal(y.isnan().any(-1), broken)


def test_what_the_kernels_do_not_take_goes_to_pytorch():
    given = inputs((2, 4, 40, 40, 24))
    q, k, v, dy = given
    cases = {
        "a mask": (given, {"attn_mask": causal_mask(40, 40)}),
        "a scale below 0": (given, {"scale": -30.0}),
        "float64": ([x.double() for x in given], {}),
        "columns apart": ([x.mT.contiguous().mT for x in given], {}),
        "no key": ([q, k[:, :, :0], v[:, :, :0], dy], {}),
    }
    for tensors, options in cases.values():
        attention = partial(F.scaled_dot_product_attention, **options)
        found, expected = (run(attention, *tensors) for run in (ours, results))
        assert all(one.equal(other) or other.isnan().all() for one, other in zip(found, expected, strict=True))
    for one in ((q[0], k[0], v[0]), (q, k[:, :3], v[:, :3]), (q.double(), k.double(), v.double())):
        assert attention_gradients(dy, *one, AttentionOptions()) is None
