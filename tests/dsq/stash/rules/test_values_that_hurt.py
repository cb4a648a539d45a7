"""bfp at 4 bits on the values at which coding whatever is saved ruined gradients: each is exact, or close."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dsq.stash import apply, measure
from tests.dsq.stash.every_policy import Of

LEAST = 0.95  #: cosine of every gradient


def gradients(model, x, upstream=None):
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    y = model(x)
    if upstream is None:
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    return torch.autograd.grad(y, (x, *model.parameters()), upstream)


def pairs(function, x, *parameters, upstream=None, policy="bfp"):
    """(under the policy, exact) gradients of the input and the parameters."""
    model = Of(function, *parameters)
    exact = gradients(model, x, upstream)
    apply(model, policy, **({"bits": 4} if policy == "bfp" else {}))
    return list(zip(gradients(model, x, upstream), exact, strict=True))


def cosine(a, b):
    return float(F.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def written(q, k, v):
    return F.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


@pytest.mark.parametrize("attention", [F.scaled_dot_product_attention, written], ids=["in one call", "written"])
@pytest.mark.parametrize(("deviation", "least"), [(1, 0.95), (2, 0.9), (4, 0.85), (6, 0.8)])
def test_peaked_attention(deviation, least, attention):
    q, k = (deviation * drawn(1, 1, 128, 32, seed=s) for s in (1, 2))
    for actual, exact in pairs(attention, q, k, drawn(1, 1, 128, 32, seed=3)):
        assert cosine(actual, exact) >= least
        assert 1 / 1.5 < actual.norm() / exact.norm() < 1.5


@pytest.mark.parametrize("policy", ["bfp", "gact", "mesa"])
@pytest.mark.parametrize("deviation", [6, 30])
def test_attention_is_bounded_at_any_peak(deviation, policy):
    q, k, v = (scale * drawn(1, 1, 128, 32, seed=s) for s, scale in enumerate((deviation, deviation, 1)))
    for actual, exact in pairs(F.scaled_dot_product_attention, q, k, v, policy=policy):
        assert actual.isfinite().all()
        assert actual.norm() < 3 * exact.norm()


def _mask(value):
    return torch.full((64, 64), value).triu(1)


X, W = drawn(64, 64), drawn(64, 64, seed=1) / 8
IMAGES = drawn(4, 8, 16, 16)
CHANNELS = torch.ones(8), torch.zeros(8)
FEATURES = torch.ones(64), torch.zeros(64)
ROWS = 10.0 ** torch.linspace(-3, 3, 64)[:, None]  # of very different size
WHOLE = torch.arange(40)[:, None] == 3  # a row that is NaN, which the model takes away; rows of 40 share blocks with it

CASES = {
    "mask of -inf": (lambda x, w: F.scaled_dot_product_attention(x @ w, x, x, _mask(-torch.inf)), X, W),
    "mask of -1e9": (lambda x, w: F.scaled_dot_product_attention(x @ w, x, x, _mask(-1e9)), X, W),
    "added mask of -inf": (lambda x, w: F.softmax(x @ w @ x.mT / 8 + _mask(-torch.inf), -1) @ x, X, W),
    "added mask of -1e9": (lambda x, w: F.softmax(x @ w @ x.mT / 8 + _mask(-1e9), -1) @ x, X, W),
    "a row masked as a whole": (
        lambda x, w: torch.nan_to_num((x @ w @ x.mT).masked_fill(WHOLE, -torch.inf).softmax(-1)) @ x, drawn(40, 64), W
    ),
    "layer norm of x + 100": (lambda x, w, b: F.layer_norm(x + 100, (64,), w, b), X, *FEATURES),
    "rms norm of x + 100": (lambda x, w: F.rms_norm(x + 100, (64,), w), X, FEATURES[0]),
    "group norm of x + 100": (lambda x, w, b: F.group_norm(x + 100, 4, w, b), IMAGES, *CHANNELS),
    "batch norm of 100 +- 1": (
        lambda x, w, b, m: F.linear(F.batch_norm(x + 100, None, None, w, b, True), m), X, *FEATURES, W
    ),
    "layer norm of rows of any size": (lambda x, w, b: F.layer_norm(ROWS * x, (64,), w, b), X, *FEATURES),
    "linear of rows of any size": (lambda x, w: F.linear(ROWS * x, w), X, W),
    "norm and linear of rows of any size": (
        lambda x, w, b, m: F.linear(F.layer_norm(ROWS * x, (64,), w, b), m), X, *FEATURES, W
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_is_exact_or_close(case):
    for actual, exact in pairs(*CASES[case]):
        assert actual.isfinite().all()
        assert cosine(actual, exact) >= LEAST
        assert 0.8 < actual.norm() / exact.norm() < 1.25


NORMS = {
    "layer norm": lambda x: F.layer_norm(x, (64,)),
    "RMS norm": lambda x: F.rms_norm(x, (64,)),
    "instance norm": lambda x: F.instance_norm(x[None])[0],
    "normalize": lambda x: F.normalize(x, dim=-1),
}


@pytest.mark.parametrize("name", NORMS)
def test_rows_of_infinite_variance_are_zero_to_a_norm(name):
    x = drawn(64, 64)
    x[3] *= 1e19  # of 1e20 PyTorch's layer norm gives NaN
    for actual, exact in pairs(lambda x, w: F.linear(NORMS[name](x), w), x, drawn(64, 64, seed=1)):
        assert actual.isfinite().all()
        assert (actual - exact).norm() < 0.1 * exact.norm()


def test_a_softmax_whose_upstream_gradient_has_a_large_common_part():
    """Rows sum to 1, so the common part cancels."""
    scores = drawn(4, 64, 64)
    upstream = 10 + drawn(4, 64, 64, seed=1)
    for actual, exact in pairs(lambda x: F.softmax(2 * x, -1), scores, upstream=upstream):
        assert (actual - exact).norm() <= 0.2 * exact.norm()


def test_a_loss_of_minus_log_sees_the_improbable_classes_of_a_softmax():
    scores = drawn(2048, 10)
    answers = F.softmax(3 * scores, -1)[:, :1]
    upstream = F.pad(-1 / answers, (0, 9))
    actual, exact = pairs(lambda x: F.softmax(3 * x, -1), scores, upstream=upstream)[0]
    for least in (1e-3, 1e-2, 0.1):
        rows = ((answers > least) & (answers < 10 * least)).squeeze()
        assert abs(actual[rows, 0].mean() / exact[rows, 0].mean() - 1) < 0.05
        assert cosine(actual[rows], exact[rows]) >= LEAST


WRITTEN = {
    "a product": lambda residual, s: (residual * (-s).exp()) ** 2,
    "a quotient": lambda residual, s: (residual / s.exp()) ** 2,
    "a square": lambda residual, s: residual.square() * (-2 * s).exp(),
}


@pytest.mark.parametrize("gaussian", WRITTEN)
def test_a_gaussian_that_a_model_writes_out_sees_residuals_of_any_size(gaussian):
    """As of a mixture, where the component that fits a point stands beside those that do not."""
    data, sizes = drawn(64, 1), 10.0 ** torch.linspace(-3, 0, 16)
    means = data + sizes * drawn(64, 16, seed=1)
    function = lambda x, s: WRITTEN[gaussian](data - x, s)  # noqa: E731
    for actual, exact in pairs(function, means, sizes.log().expand(64, 16)):
        assert F.cosine_similarity(actual, exact, dim=0).min() >= LEAST  # a component's


def test_exponential_decays_of_a_recurrence_keep_their_gradient():
    """Rounded, a decay of .97 is 1, and 128 of them in a row 50 times what they are."""

    def recurrence(x, w):
        state = 0 * w
        for decay in torch.exp(-x):
            state = decay * state + w
        return state

    for actual, exact in pairs(recurrence, (0.03 + 0.005 * drawn(32, 16)).expand(128, 32, 16), drawn(32, 16)):
        assert cosine(actual, exact) >= LEAST
        assert 0.9 < actual.norm() / exact.norm() < 1.1


@pytest.mark.parametrize("gates", [lambda x: map(torch.sigmoid, x), torch.sigmoid])
def test_gates_of_a_recurrence_and_what_they_leave_sum_to_one(gates):
    """Rounded by itself, a 1 - z of .95 is 1 or .86, in each step; so is a slice of gates made for all."""

    def recurrence(x, w):
        state = w
        for gate, news in zip(gates(x - 3), drawn(128, 32, 16, seed=2), strict=True):
            state = (1 - gate) * state + gate * news
        return state

    for actual, exact in pairs(recurrence, drawn(128, 32, 16), drawn(32, 16)):
        assert (actual - exact).norm() < 0.1 * exact.norm()


LSTM, GRU = nn.LSTM(32, 32), nn.GRU(32, 32)
ADJACENCY = (drawn(30, 30) > 1).float()
WITHOUT_A_RULE = {
    "einsum without a sum": lambda x: torch.einsum("abi,aci->abci", x, x),
    "einsum of three": lambda x: torch.einsum("abi,aci,adi->abcd", x, x, x),
    "einsum of an index that one alone has": lambda x: torch.einsum("abi,aij->aj", x, x[:, :1].mT.expand(-1, -1, 7)),
    "einsum of a diagonal": lambda x: torch.einsum("abb,abi->ai", x[..., :4], x),
    "einsum of an axis that broadcasts": lambda x: torch.einsum("abi,abj->aij", x[:1], x),
    "einsum of broadcast leading axes": lambda x: torch.einsum("...bi,...bj->...ij", x[:1], x),
    "einsum whose result is left open": lambda x: torch.einsum("abi,aci", x, x),
    "of complex numbers": lambda x: torch.complex(x, x.flip(0)).matmul(torch.complex(x, -x).mT).square().abs(),
    "norm": lambda x: x.norm(dim=-1),
    "normalize, by the sum": lambda x: F.normalize(x, p=1, dim=-1),
    "x ** -0.5": lambda x: x.abs() ** -0.5,
    "division": lambda x: x / (x.flip(0).abs() + 0.01),
    "gumbel_softmax": F.gumbel_softmax,
    "LSTM": lambda x: LSTM(x)[0],
    "GRU": lambda x: GRU(x)[0],
    "sparse @": lambda x: ADJACENCY.to_sparse() @ x[:, 0],
    "mm of a sparse matrix": lambda x: torch.mm(ADJACENCY.to_sparse_csr(), x[:, 0]),
}


@pytest.mark.parametrize("name", WITHOUT_A_RULE)
def test_an_operation_without_a_rule_is_exact(name):
    gradient_pairs = pairs(lambda x, w: WITHOUT_A_RULE[name](x + w), drawn(30, 4, 32), torch.zeros(32))
    assert all(torch.equal(*pair) for pair in gradient_pairs)


@pytest.mark.parametrize(("policy", "least"), [("bfp", LEAST), ("gact", 0.6), ("mesa", LEAST)])
@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, F.softplus, F.elu])
def test_infinite_inputs_of_functions_that_saturate(policy, least, function):
    """The scores of experts that were not chosen, which a router's sigmoid takes to 0."""
    masked = torch.arange(64) % 4 != 1
    saturating = lambda x, w: function((x * w).masked_fill(masked, -math.inf)).square()  # noqa: E731
    for actual, exact in pairs(saturating, drawn(64, 64), torch.ones(64), policy=policy):
        assert cosine(actual, exact) > least


def test_a_weight_that_is_standardized_costs_nothing():
    """As in a network without norms: batch_norm of a weight keeps the weight, which exists anyway."""
    function = lambda x, w: x @ F.batch_norm(w[None], None, None, training=True)[0].T  # noqa: E731
    model = Of(function, drawn(64, 64, seed=1))
    before = measure(lambda: model(drawn(32, 64)).sum()).nbytes
    exact = gradients(model, drawn(32, 64))
    controller = apply(model, "bfp", bits=4)
    assert measure(lambda: model(drawn(32, 64)).sum()).nbytes <= before
    assert controller.report().saved_bytes > 0
    for actual, true in zip(gradients(model, drawn(32, 64)), exact, strict=True):
        assert cosine(actual, true) > 0.99


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_no_rows(training):
    """As of a step in which a head has no block: PyTorch's backward by itself ends the process there."""
    function = lambda x, w: F.batch_norm(x * w, torch.zeros(8), torch.ones(8), w, None, training)  # noqa: E731
    model, x = Of(function, torch.ones(8)), torch.empty(0, 8)
    apply(model, "bfp")
    assert gradients(model, x, x)[1].count_nonzero() == 0


def test_a_wider_softmax_of_halves():
    """As fairseq's attention makes it."""
    wider = lambda x, w: F.softmax(x * w, -1, dtype=torch.float32)  # noqa: E731
    for actual, exact in pairs(wider, drawn(64, 64).half(), torch.ones(64).half()):
        assert actual.dtype == torch.float16
        assert cosine(actual, exact) > LEAST
