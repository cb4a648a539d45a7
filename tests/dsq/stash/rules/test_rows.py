"""Rules in float32, in halves and under autocast, and what they save."""

from types import FunctionType

import pytest
import torch
from torch.nn import functional as F

from dsq.kernels.product_dtype import product_dtype
from dsq.stash import measure
from dsq.stash.rules import RULES
from dsq.stash.rules.masks import Clamp
from tests.dsq.gradients import same
from tests.dsq.stash.rules.cases import CASES, IN_PLACE, X, drawn
from tests.dsq.stash.rules.exactly import under_the_table


def run(function, inputs, row):
    """The result, its gradients and the stash of the plain operation or of its row."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    torch.manual_seed(7)
    y, stash = under_the_table(function, *leaves) if row else (function(*leaves), None)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    return y, torch.autograd.grad(y, leaves, upstream), stash


def test_no_key_is_a_method_that_pytorch_wrote_in_python():
    """A compiler finds none in a dict: dsq/stash/interception.py looks up torch's own function in its place."""
    functions = [key for key in RULES if isinstance(key, FunctionType)]
    assert not [key for key in functions if key.__qualname__.startswith("Tensor.")]


def test_grouped_products_of_experts():
    ends = torch.tensor([10, 10, 36], dtype=torch.int32)  # of three groups, of which one is empty
    inputs = [drawn(36, 32).float(), drawn(3, 32, 24).float()]  # the operation takes no float64
    y, plain, _ = run(lambda x, w: F.grouped_mm(x, w, offs=ends), inputs, row=False)
    result, actual, stash = run(lambda x, w: F.grouped_mm(x, w, offs=ends), inputs, row=True)
    assert stash.bytes.saved > 0
    assert same([result, *actual], [y, *plain])


@pytest.mark.parametrize("case", ["attention, learned bias under masks", "attention, sum of masks"])
def test_a_bias_under_masks_is_made_again_of_both(case):
    function, shapes = CASES[case]
    leaves = [drawn(*shape).float().requires_grad_() for shape in shapes]
    held = measure(lambda: under_the_table(function, *leaves)[0]).tensors
    assert (3, 4, 16, 16) not in {tensor.shape for tensor in held}


@pytest.mark.parametrize("case", ["index_add", "index_add in place, twice"])
def test_index_add_keeps_no_summand(case):
    function, shapes = CASES[case]
    _, _, stash = run(function, [drawn(*shape) for shape in shapes], row=True)
    assert stash.bytes.saved <= 3 * 8 + 8


#: what sums up in another order than PyTorch
IN_ANOTHER_ORDER = (
    "attention, dropout",
    "attention, dropout, long",
    "attention, dropout, biased",
    "einsum bthe,hed->btd",
    "einsum bdte,bdes->sbt",
)


@pytest.mark.parametrize(("autocast", "slack"), [(False, 1e-4), (True, 0.01)])
@pytest.mark.parametrize("case", CASES)
def test_in_float32_and_under_autocast_a_forward_has_the_bits_of_the_plain_one(case, autocast, slack):
    function, shapes = CASES[case]
    inputs = [drawn(*shape, seed=i).float() for i, shape in enumerate(shapes)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, plain, _ = run(function, inputs, row=False)
        result, actual, stash = run(function, inputs, row=True)
    # a row ran: something is kept in its stash, or the node is an autograd function (PyTorch's end with a digit)
    ran = stash.bytes.saved > 0 or not result.grad_fn.name()[-1].isdigit()
    assert ran, "no row ran: is the key the very function that is called? Tensor.gather is not torch.gather"
    in_float32 = autocast and product_dtype(torch.bfloat16, "cpu") is torch.float32  # by other kernels of PyTorch's
    in_order = case not in IN_ANOTHER_ORDER and not in_float32 and not (autocast and "masks" in case)
    assert (result - y).norm() <= (0 if in_order else slack) * y.norm()
    for a, b in zip(actual, plain, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= slack * b.norm()


@pytest.mark.parametrize("before", [lambda x: x + 0, lambda x: F.layer_norm(x, (32,))], ids=["a sum", "a norm"])
@pytest.mark.parametrize("function", IN_PLACE)
def test_a_form_in_place_keeps_what_the_other_does(function, before):
    x, w = drawn(64, 32).float().requires_grad_(), drawn(32, 32).float().requires_grad_()
    _, in_place = under_the_table(lambda: F.linear(function(before(x), inplace=True), w))
    _, other = under_the_table(lambda: F.linear(function(before(x)), w))
    assert in_place.bytes.saved == other.bytes.saved


def test_a_convolution_without_padding_keeps_the_same_by_either_name():
    x, w = drawn(4, 8, 9, 9).requires_grad_(), drawn(6, 8, 3, 3).requires_grad_()
    by_name, by_number = (under_the_table(F.conv2d, x, w, padding=padding)[1].bytes.saved for padding in ("valid", 0))
    assert by_name == by_number > 0


def test_the_mask_of_native_dropout_says_what_it_kept_also_of_zeros():
    x = drawn(64, 32).float().relu().requires_grad_()
    torch.manual_seed(3)
    (y, mask), _ = under_the_table(torch.native_dropout, x, 0.3, True)
    assert 0.6 < mask.float().mean() < 0.8
    assert y.equal(x * (mask / (1 - 0.3)))
    assert torch.autograd.grad(y.sum(), x)[0].equal(mask / (1 - 0.3))


def test_the_gradient_of_a_clamp_has_the_dtype_of_its_result():
    """The next operation of a compiled graph takes it as it is: autograd casts it outside of graphs alone."""
    y, _ = under_the_table(torch.clamp, drawn(*X).bfloat16().requires_grad_(), -0.5, 0.5)
    with torch.no_grad():
        assert Clamp.backward(y.grad_fn, torch.ones_like(y))[1].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["rms norm", "linear, layer norm", "layer norm of nearly nothing", "normalize"])
def test_norms_of_small_halves(case, dtype):
    """Where eps counts, which is that of float32 by default, and 1 / deviation squared is no half."""
    function, shapes = CASES[case]
    inputs = [drawn(*shape, seed=i, scale=0.02).to(dtype) for i, shape in enumerate(shapes)]
    actual, plain = (run(function, inputs, row)[1] for row in (True, False))
    for a, b in zip(actual, plain, strict=True):
        assert (a - b).norm() <= 0.02 * b.norm()


@pytest.mark.parametrize("case", ["group norm", "linear, layer norm", "rms norm", "normalize"])
def test_autocast_takes_no_row_from_a_norm(case):
    function, shapes = CASES[case]
    leaves = [drawn(*shape).float().requires_grad_() for shape in shapes]
    with torch.autocast("cpu", torch.bfloat16):
        assert not measure(lambda: under_the_table(function, *leaves)[0]).exact
