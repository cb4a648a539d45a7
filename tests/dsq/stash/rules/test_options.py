"""Every rule, and every option of its operation, against PyTorch in float64; and what rules promise to keep exact."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import dsq
from tests.dsq.stash.census import peak_bytes
from tests.dsq.stash.rules.cases import CASES, PLACES, X, drawn
from tests.dsq.stash.rules.exactly import Exactly, under_the_table

LAYOUTS = {
    "contiguous": torch.clone,
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x.clone(),
    "with gaps": lambda x: torch.stack((x, -x), -1)[..., 0],
}
ROWS, IMAGES = (6, 8), (2, 4, 9, 7)
INFINITE = (
    drawn(4, 8).masked_fill(drawn(4, 8, seed=1) > 0.5, torch.inf).masked_fill(drawn(4, 8, seed=1) < -0.5, -torch.inf)
)
ZEROS = drawn(4, 8) * (torch.arange(4) > 1)[:, None]


def norms(shape, *functions):
    """Each function with a weight and a bias, with one of them, and with none."""
    for name, function in functions:
        scale = shape[-1:] if name == "layer norm" else shape[1:2]
        yield f"{name}, neither", lambda x, function=function: function(x), [shape]
        yield f"{name}, weight alone", lambda x, w, function=function: function(x, weight=w), [shape, scale]
        if name != "group norm":  # PyTorch's own backward fails there
            yield f"{name}, bias alone", lambda x, b, function=function: function(x, bias=b), [shape, scale]
        yield name + ", both", lambda x, w, b, function=function: function(x, weight=w, bias=b), [shape, scale, scale]


def running(function, **options):
    def run(x, **scales):
        mean, variance = torch.full((4,), 0.5).double(), torch.full((4,), 2.0).double()
        y = function(x, mean, variance, **scales, **options)
        return y, mean, variance

    return run


def _in_place(function, part=lambda x: x):
    """The function in place of a part of a tensor, of which all is returned."""

    def run(x):
        h = x + 0
        function(part(h))
        return h

    return run


OPTIONS = {
    **{name: (function, shapes) for name, function, shapes in norms(
        IMAGES,
        ("layer norm", lambda x, **scales: F.layer_norm(x, (7,), **scales)),
        ("group norm", lambda x, **scales: F.group_norm(x, 2, **scales, eps=0.1)),
        ("instance norm", lambda x, **scales: F.instance_norm(x, **scales, eps=0.1)),
        ("batch norm", running(F.batch_norm, training=True, momentum=0.3)),
        ("batch norm, evaluated", running(F.batch_norm)),
    )},
    "rms norm, eps": (lambda x, w: F.rms_norm(x, (32,), w, eps=0.3), [X, (32,)]),
    "normalize by 3": (lambda x: F.normalize(x, 3.0), [ROWS]),
    "normalize, dim 0": (lambda x: F.normalize(x, dim=0, eps=2.0), [ROWS]),
    "normalize, zero rows": (partial(F.normalize, dim=1), [ZEROS]),
    "vector norm, zero rows": (lambda x: torch.linalg.vector_norm(x.square(), dim=1), [ZEROS]),
    "norm, zero rows": (lambda x: F.silu(x).norm(dim=1, keepdim=True), [ZEROS]),
    "norm by 1": (lambda x: F.silu(x).norm(1, -1), [ROWS]),
    "vector norm of a dtype": (lambda x: torch.linalg.vector_norm(x.square(), dtype=torch.float64), [ROWS]),
    "linear of a vector": (F.linear, [(32,), (24, 32), (24,)]),
    **{f"addmm, {beta}, {alpha}, {len(shape)} axes": (
        partial(torch.addmm, beta=beta, alpha=alpha), [shape, (6, 8), (8, 5)]
    ) for beta, alpha in ((1, 1), (0.5, 1), (1, 3), (0, 2)) for shape in ((5,), (6, 5))},
    "matmul by a vector": (torch.matmul, [X, (32,)]),
    "matmul of a vector": (torch.matmul, [(16,), X]),
    "matmul, a broadcasts": (torch.matmul, [(5, 16), X]),
    "matmul, b broadcasts": (torch.matmul, [X, (2, 1, 32, 5)]),
    "conv1d, same": (partial(F.conv1d, padding="same", dilation=2), [(2, 4, 32), (6, 4, 3), (6,)]),
    "conv2d, same, one even": (partial(F.conv2d, padding="same"), [IMAGES, (6, 4, 3, 2)]),
    "conv2d, valid": (partial(F.conv2d, padding="valid", stride=2), [IMAGES, (6, 4, 3, 2)]),
    "conv2d, unlike axes": (partial(F.conv2d, stride=(2, 1), padding=(0, 2), dilation=(1, 2)), [IMAGES, (6, 4, 3, 2)]),
    "conv2d of an image": (partial(F.conv2d, padding=1), [IMAGES[1:], (6, 4, 3, 3)]),
    "conv_transpose2d, groups": (
        partial(F.conv_transpose2d, stride=(3, 2), padding=1, output_padding=(2, 1), groups=2, dilation=2),
        [IMAGES, (4, 3, 3, 2), (6,)],
    ),
    **{f"{name} at infinity": (function, [INFINITE]) for name, function in (
        ("tanh", torch.tanh), ("sigmoid", torch.sigmoid), ("relu6", F.relu6), ("hardtanh", F.hardtanh),
    )},
    **{f"{name} at minus infinity": (function, [INFINITE.minimum(torch.tensor(1.0))]) for name, function in (
        ("elu", partial(F.elu, alpha=0.5)), ("selu", F.selu), ("softplus", partial(F.softplus, beta=2.0)),
    )},
    "softplus, threshold": (partial(F.softplus, beta=2.0, threshold=1.0), [X]),
    "leaky relu, slope": (partial(F.leaky_relu, negative_slope=0.3), [X]),
    "hardtanh, limits": (partial(F.hardtanh, min_val=-0.2, max_val=0.7), [X]),
    "glu, dim": (partial(F.glu, dim=1), [X]),
    "prelu of one weight": (F.prelu, [X, (1,)]),
    "prelu of rows": (F.prelu, [ROWS, (8,)]),
    "prelu of a number": (F.prelu, [(), (1,)]),
    "mul, a broadcasts": (torch.mul, [(16, 1), X]),
    "mul, both broadcast": (torch.mul, [(16, 1), (3, 1, 32)]),
    "mul by itself": (lambda x: x * x, [X]),
    "addcmul, value, broadcast": (partial(torch.addcmul, value=-2), [(16, 1), X, (32,)]),
    "sub, alpha": (lambda x, y: torch.sub(x, y, alpha=3) ** 2, [X, (32,)]),
    "rsub, alpha": (lambda x: torch.rsub(x.sigmoid(), 2, alpha=3), [X]),
    "div, rounded": (lambda x, y: torch.div(x, y, rounding_mode="floor") * x, [X, X]),
    "relu in place of a part": (_in_place(torch.relu_, lambda h: h[1:]), [ROWS]),
    "relu in place of columns": (_in_place(partial(F.relu, inplace=True), lambda h: h[:, ::2]), [ROWS]),
    "elu in place of a part": (_in_place(partial(F.elu, inplace=True), lambda h: h[:, 1:5]), [ROWS]),
    "dropout in place of a part": (_in_place(partial(F.dropout, inplace=True), lambda h: h[2:]), [ROWS]),
    "index_add in place of a part": (_in_place(lambda h: h.index_add_(0, PLACES, h[:3] * 2), lambda h: h[1:]), [ROWS]),
    "clamp, min": (partial(torch.clamp, min=0.2), [ROWS]),
    "clamp, max": (partial(torch.clamp, max=-0.2), [ROWS]),
    "clamp by tensors": (lambda x: torch.clamp(x, drawn(8) - 2, drawn(8) + 2), [ROWS]),
    "clamp of NaN": (partial(torch.clamp, min=-1, max=1), [torch.tensor([[torch.nan, 0.5, 1.0, 3.0]]).double()]),
    **{f"dropout, {p}": (partial(F.dropout, p=p), [ROWS]) for p in (0.0, 0.3, 1.0)},
    "dropout, evaluated": (partial(F.dropout, training=False), [ROWS]),
    "native dropout": (lambda x: torch.native_dropout(x, 0.3, True), [ROWS]),
    "max pool with indices": (partial(F.max_pool2d, kernel_size=2, return_indices=True), [IMAGES]),
    "max pool, dilated": (lambda x: F.max_pool2d(x, (3, 2), 1, 1, (2, 1), True), [IMAGES]),
    "max pool of an image": (partial(F.max_pool2d, kernel_size=2), [IMAGES[1:]]),
    "max pool of more than 2 ** 15 places": (partial(F.max_pool2d, kernel_size=3), [(1, 1, 129, 256)]),
    "average pool, divided": (lambda x: F.avg_pool2d(x, 3, 2, 1, True, False, 5), [IMAGES]),
    "average pool without padding": (lambda x: F.avg_pool2d(x, 3, padding=1, count_include_pad=False), [IMAGES]),
    **{f"adaptive pool to {size}": (partial(F.adaptive_avg_pool2d, output_size=size), [IMAGES])
       for size in (1, (3, None), (None, 1))},
    "adaptive pool of an image": (partial(F.adaptive_avg_pool2d, output_size=3), [IMAGES[1:]]),
    **{f"pad, {mode}": (partial(F.pad, pad=(1, 2), mode=mode), [(2, 4, 9)])
       for mode in ("constant", "circular", "reflect")},
    "gather, dim -1": (lambda x: torch.gather(x, -1, PLACES.expand(6, 3)), [ROWS]),
    "index_select, dim -1": (lambda x: torch.index_select(x.square(), -1, PLACES), [ROWS]),
    "index_add of one": (lambda x, s: torch.index_add(x, 0, torch.tensor(2), s, alpha=-2), [(8,), (1,)]),
    "index_add, dim -1": (lambda x, s: torch.index_add(x, -1, PLACES, s, alpha=-2), [ROWS, (6, 3)]),
}  # fmt: skip


def program(function, *leaves):
    """The results, and the squares of those that have a gradient: a square reads its input again."""
    results = tree_leaves(function(*leaves))
    return results, [torch.square(y) for y in results if y.requires_grad]


def outcome(function, inputs, places, table):
    """The results, and the gradients of the inputs at ``places``: of the sum, whose own gradient is expanded, and of
    the sum of squares."""
    leaves = [x.detach().requires_grad_(place in places) for place, x in enumerate(inputs)]
    torch.manual_seed(7)
    run = under_the_table if table else lambda f, *args: (f(*args), None)
    (results, squares), _ = run(program, function, *leaves)
    totals = sum(y.sum() for y in results if y.requires_grad), sum(y.sum() for y in squares)
    options = {"retain_graph": True, "allow_unused": True}
    return results, [torch.autograd.grad(total, [leaves[place] for place in places], **options) for total in totals]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES | OPTIONS)
def test_a_rule_is_pytorchs(case, layout, monkeypatch):
    monkeypatch.setattr("dsq.stash.stash.MAX_EXACT_NUMEL", 0)
    function, shapes = (CASES | OPTIONS)[case]
    inputs = [x if isinstance(x, torch.Tensor) else drawn(*x, seed=i) for i, x in enumerate(shapes)]
    inputs = [LAYOUTS[layout](x) for x in inputs]
    all_places = range(len(inputs))
    tolerance = 1e-6 if case.endswith("infinity") else 1e-9  # an infinite value is read as a large one
    for places in {tuple(all_places), *((place,) for place in all_places)}:
        actual, expected = (outcome(function, inputs, places, table) for table in (True, False))
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


class Nothing(Exactly):
    """Codes that say nothing: whatever is coded comes back as zeros."""

    def encode(self, values, order, role):
        return super().encode(torch.zeros_like(values), order, role)


KEEP_THEIR_RESULT = {
    "exp": torch.exp, "exp2": torch.exp2, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal,
    "cumprod": lambda x: x.cumprod(1), "logcumsumexp": lambda x: x.logcumsumexp(1),
}  # fmt: skip
#: of an input and a parameter, both (300, 20): what is kept exact, and for which of both gradients
EXACT = {
    "few values": (lambda x, w: F.linear(x[:12], w), 1),
    "a factor that broadcasts": (lambda x, w: x[:, :1] * w.exp2(), 1),
    "a factor that broadcasts, on the other side": (lambda x, w: w.exp2() * x[:, :1], 1),
    "a factor without a gradient": (lambda x, w: x.detach() * w, 1),
    "a weight that einsum arranges": (
        lambda x, w: torch.einsum("tdh,nhd->tn", x.view(-1, 4, 5), w.view(-1, 5, 4)), 0
    ),
    "an einsum without a sum": (lambda x, w: torch.einsum("td,nd->tnd", x[:20], w[:20] * 1), 1),
    "a weight that is normalized": (lambda x, w: F.normalize(w), 1),
    "a difference to data": (lambda x, w: (x - drawn(300, 20)).square(), 0),
    **{name: (lambda x, w, make=make: make(x) * w.square(), 1) for name, make in KEEP_THEIR_RESULT.items()},
}  # fmt: skip


@pytest.mark.parametrize("case", EXACT)
def test_what_is_kept_exact_is_not_coded(case):
    function, place = EXACT[case]
    leaves = [drawn(300, 20).abs().requires_grad_(), nn.Parameter(drawn(300, 20, seed=1))]
    gradients = [torch.autograd.grad(y.sum(), leaves[place])[0] for y in (
        under_the_table(function, *leaves, codec=Nothing())[0], function(*leaves)
    )]  # fmt: skip
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=0)


def test_grouped_products_take_an_expanded_gradient():
    """PyTorch's own kernel refuses one, and float64."""
    leaves = [drawn(36, 32).float().requires_grad_(), drawn(3, 32, 24).float().requires_grad_()]
    run = partial(F.grouped_mm, offs=torch.tensor([10, 10, 36], dtype=torch.int32))
    y, plain = under_the_table(run, *leaves)[0], run(*leaves)
    actual = torch.autograd.grad(y.sum(), leaves)
    torch.testing.assert_close(actual, torch.autograd.grad(plain, leaves, torch.ones(36, 24)))


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[1:], lambda x: x[:0]], ids=["whole", "part", "nothing"])
def test_relu_in_place_of_a_leaf_is_refused_before_it_changes_a_value(part):
    x = drawn(*ROWS).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place operation"):
        under_the_table(lambda: torch.relu_(part(x)))
    assert x.equal(drawn(*ROWS))


@pytest.mark.parametrize("names", [(), ("weight",), ("bias",), ("weight", "bias")])
def test_a_layer_behind_a_norm_keeps_nothing(names):
    x, w = drawn(20, 32).requires_grad_(), nn.Parameter(drawn(24, 32))
    scales = {name: nn.Parameter(drawn(32)) for name in names}
    norm = lambda: F.layer_norm(x, (32,), **scales)  # noqa: E731
    of_norm, of_both = (under_the_table(run)[1].bytes.saved for run in (norm, lambda: F.linear(norm(), w)))
    assert of_norm == of_both


@pytest.mark.parametrize("product", [lambda x, w: x @ w, lambda x, w: w.mT @ x.mT], ids=["x W", "W x"])
def test_the_gradient_of_a_matrix_takes_its_own_memory_not_that_of_the_batch(product):
    x, w = torch.randn(32, 8, 64, requires_grad=True), torch.randn(64, 128, requires_grad=True)
    assert peak_bytes(lambda: under_the_table(product, x, w)[0]) < x.shape[0] * w.nbytes / 2


@pytest.mark.parametrize("linear", [F.linear, partial(dsq.functional.linear, precision="[4,4,4,8]")])
def test_a_frozen_bias_costs_no_sum(linear):
    for trained in (False, True):
        x, w, b = torch.randn(32, 64), torch.randn(48, 64, requires_grad=True), torch.randn(48, requires_grad=trained)
        y, _ = under_the_table(linear, x, w, b)
        with torch.no_grad():
            bias_gradient = y.grad_fn.apply(torch.ones_like(y))[3]
        assert (bias_gradient is not None) == trained
