"""mesa: exact forwards, gradients true up to 8 bits, ranges by the equations, bytes."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.models import encoder
from dsq import stash
from dsq.stash.meter import measure
from tests.dsq.gradients import error
from tests.dsq.stash.census import peak_bytes
from tests.dsq.stash.every_policy import Of, SelfAttention

HEADS, WIDTH = 4, 32


def batch(seed: int = 0, tokens: int = 24) -> Tensor:
    return torch.randn(4, tokens, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def block(style: str = "matmul") -> nn.Module:
    torch.manual_seed(1)
    model = encoder(1, WIDTH, HEADS, 4 * WIDTH, sdpa=style == "sdpa")[0]
    if style == "module":  # multiplies by bmm, which takes (batch heads, rows, columns)
        model.attention = SelfAttention(WIDTH, HEADS)
    return model


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, WIDTH)
    grads = torch.autograd.grad((model(x) * weights).sum(), list(model.parameters()), allow_unused=True)
    return torch.cat([g.flatten() for g in grads if g is not None])


def test_the_kept_map_decodes_by_head_within_a_step() -> None:
    """A head 1000 times larger than its neighbors does not coarsen their ranges."""
    scale = torch.tensor([1.0, 1000.0, 1.0, 1.0]).view(1, 4, 1, 1)
    q, k = (torch.rand(2, 4, 8, 8, requires_grad=True) for _ in range(2))
    model = Of(lambda q, k: torch.matmul(q * scale, k))
    stash.apply(model, "mesa")
    (grad_k,) = torch.autograd.grad(model(q, k).sum(), k)
    exact = (q * scale).detach().transpose(-2, -1).sum(-1, keepdim=True).expand_as(grad_k)
    # a column sum of 8 values, each off by at most a step of 1/255 of its head's range
    assert ((grad_k - exact).abs() <= 8 * scale / 255).all()


def test_ranges_follow_equations_6_and_7() -> None:
    model = nn.Sequential(nn.GELU())
    controller = stash.apply(model, "mesa", groups=2)
    first, second = (torch.randn(50, 6, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    for x in (first, second):
        model(x.requires_grad_())
    (ranges,) = controller.state_dict()["ranges"].values()
    for group, columns in enumerate((slice(0, 3), slice(3, 6))):
        a, b = first[:, columns], second[:, columns]
        alpha = 0.9 * (a.max() - a.min()) + 0.1 * (b.max() - b.min())
        beta = 0.9 * a.min() + 0.1 * b.min()
        torch.testing.assert_close(ranges[:, group], torch.stack([alpha, beta]))


def test_an_overflow_shows_and_does_not_spoil_the_ranges() -> None:
    model, x = block(), batch()
    controller = stash.apply(model, "mesa")
    gradient(model, x)
    bad = batch().detach()
    bad[0, 0, 0] = math.inf
    assert not gradient(model, bad.requires_grad_()).isfinite().all()
    assert all(v.isfinite().all() for v in controller.state_dict()["ranges"].values())
    assert gradient(model, x).isfinite().all()


@pytest.mark.parametrize("kind", ["matmul", "softmax", "gelu", "layernorm", "linear"])
def test_each_kind_alone_keeps_less_than_plain_and_more_than_all(kind: str) -> None:
    x = batch()
    plain = measure(lambda: block()(x)).nbytes
    one, every = block(), block()
    stash.apply(one, "mesa", kinds=(kind,))
    stash.apply(every, "mesa")
    of_kind = measure(lambda: one(x)).nbytes
    if kind == "softmax":  # the product with V keeps the same map, exact: the code comes on top
        assert of_kind <= plain * 1.1
    else:
        assert measure(lambda: every(x)).nbytes < of_kind < plain
    assert error(gradient(one, x), gradient(block(), x)) < 0.02


def test_fused_attention_has_no_map() -> None:
    """Neither between the passes nor at the peak; what it keeps is q, k and v in 8 bits."""
    tokens, features = 512, WIDTH // HEADS
    q, k, v = (torch.randn(1, HEADS, tokens, features, requires_grad=True) for _ in range(3))
    model = Of(lambda q, k, v: F.scaled_dot_product_attention(q * 1.0, k * 1.0, v * 1.0))
    controller = stash.apply(model, "mesa")
    peak, profile = peak_bytes(lambda: model(q, k, v)), measure(lambda: model(q, k, v))
    one = q.nbytes
    assert controller.report().saved_bytes == 3 * (one // 4 + 8 * HEADS)
    assert profile.nbytes <= controller.report().saved_bytes + 3 * 8  # the products' numbers
    assert peak < HEADS * tokens * tokens * 4  # the map, in float32
    assert controller.report().raw_bytes == 3 * one


def test_a_convolutions_input_is_grouped_by_channel_whoever_made_it() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
    controller = stash.apply(model, "mesa", groups=4)
    model(torch.randn(2, 3, 13, 13))
    ranges = controller.state_dict()["ranges"]
    assert {key: tuple(value.shape) for key, value in ranges.items()} == {"conv:3:0": (2, 1), "conv:16:0": (2, 4)}


@pytest.mark.parametrize("style", ["matmul", "sdpa", "module"])
def test_the_stash_is_a_quarter_and_a_batch_of_any_size_moves_the_same_ranges_and_evaluation_none(style: str) -> None:
    x, model = batch(), block(style)
    out, true = model(x), gradient(model, x)
    plain = measure(lambda: model(x.clone())).nbytes
    controller = stash.apply(model, "mesa")
    assert 0 < error(gradient(model, x), true) < 0.02
    before = controller.state_dict()["ranges"]
    gradient(model, batch(2)[:3])
    after = controller.state_dict()["ranges"]
    assert after.keys() == before.keys()
    assert all(after[key].shape == before[key].shape and not torch.equal(after[key], before[key]) for key in before)
    with torch.no_grad():
        model(batch(3))
    assert all(map(torch.equal, controller.state_dict()["ranges"].values(), after.values()))
    torch.testing.assert_close(model(x), out, rtol=1e-5, atol=1e-5)
    # codes a quarter of fp32, and statistics and ranges
    assert measure(lambda: model(x.clone())).nbytes < 0.25 * plain + 4096
    shorter = batch(2, tokens=7)
    assert error(gradient(model, shorter), gradient(block(style), shorter)) < 0.05


def test_each_tensor_and_each_step_is_rounded_by_its_own_random_numbers() -> None:
    model, x = Of(lambda a, b: F.gelu(a) + F.gelu(b)), torch.randn(64, 64)
    stash.apply(model, "mesa", decay=0.0)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    gradients = [g for _ in range(2) for g in torch.autograd.grad(model(*leaves).sum(), leaves)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(gradients, 2))
