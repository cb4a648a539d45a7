"""gact: its integer program, budget, variance and bytes; and a plain loop, with levels, casts, losses and mistakes."""

import itertools
from operator import mul

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.models import encoder
from dsq import stash
from dsq.stash.methods.gact import allocate, rounding_variance
from tests.dsq.gradients import all_gradients, error, gradient
from tests.dsq.stash.every_policy import Checkpointed, SelfAttention


class Sensitive(nn.Module):
    """Four layers; the gradient needs the input of the third one's activation far more than the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (F.gelu(layer(x)) for layer in self.layers[:-1])
        return self.layers[-1](a + b + 30 * c)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 5)
        self.blocks = encoder(2, 32, 4, 64)[:2]
        for block in self.blocks:
            block.attention = SelfAttention(32, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)).mean(1))


def make(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind()


def rows(seed: int = 0) -> Tensor:
    return torch.randn(128, 32, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int = 0, length: int = 12) -> Tensor:
    return torch.randint(50, (4, length), generator=torch.Generator().manual_seed(seed))


def bits_used(report: stash.PolicyStatus) -> float:
    return float(report.details[0].split()[0])


def test_allocation_is_the_best_there_is_on_small_cases() -> None:
    widths, sizes, budget = (1, 2, 3, 4), (400, 20, 100, 60), 2.5 * 580
    for seed in (0, 1, 2, 4):  # in 3 another last widening is better
        c = torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()
        bits = allocate(tuple(c), sizes, budget, widths)
        schemes = (s for s in itertools.product(widths, repeat=4) if sum(map(mul, s, sizes)) <= budget)
        best = min(sum(a * rounding_variance(b) for a, b in zip(c, s, strict=True)) for s in schemes)
        assert sum(a * rounding_variance(b) for a, b in zip(c, bits, strict=True)) == pytest.approx(best)


@pytest.mark.parametrize("bits", [2, 2.5])
@pytest.mark.parametrize("kind, x", [(Sensitive, rows()), (Encoder, tokens())])
def test_average_bits_are_met(kind: type[nn.Module], x: Tensor, bits: float) -> None:
    model = make(kind)
    controller = stash.apply(model, "gact", bits=bits)
    gradient(model, x)
    assert f"uniform bits within {bits}" in controller.report().details[0]
    for _ in range(3):
        gradient(model, x)
    assert f"the budget is {bits}" in controller.report().details[0]
    # one of five equal tensors is the least step
    assert bits - 0.2 < bits_used(controller.report()) <= bits


def test_the_sensitive_tensor_gets_more_bits_than_its_like() -> None:
    model = make(Sensitive)
    controller = stash.apply(model, "gact", bits=3)
    for _ in range(3):
        gradient(model, rows())
    bits = controller.run.bits  # in the order of the forward: the input, three of gelu, their sum
    assert bits[3] > 3 > max(bits[1:3])


def test_sensitivities_predict_the_variance() -> None:
    """Theorem 2: the variances of the tensors add up; c_l S(b) measured at one width holds at another."""
    model = make(Encoder)
    controller = stash.apply(model, "gact", bits=5)
    for _ in range(2):
        gradient(model, tokens())
    (measured,) = controller.plan.measured.values()
    for bits in (4, 6):
        controller.remove()
        controller = stash.apply(model, "gact", bits=bits, adapt_interval=None)
        variance = torch.stack([gradient(model, tokens()) for _ in range(30)]).var(0).sum().item()
        assert sum(measured[0]) * rounding_variance(bits) == pytest.approx(variance, rel=0.4)


def test_kept_bytes_of_an_encoder_with_dropout() -> None:
    """Masks in one bit, the input of q, k and v once, weights not at all."""
    model = nn.Sequential(SelfAttention(32, 4, 0.1), nn.Dropout(0.5))
    controller = stash.apply(model, "gact", bits=4, adapt_interval=None)
    model(torch.randn(8, 64, 32, requires_grad=True))
    width, maps = 8 * 64 * 32, 8 * 4 * 64 * 64

    def codes(n: int) -> int:
        return n // 2 + n // 256 * 8

    # input; q (scaled), k, v; the map, from which dropout's result is made again; attention's output; two masks
    assert controller.report().saved_bytes == codes(width) * 5 + codes(maps) + width // 8 + maps // 8


def test_outputs_of_which_one_is_made_of_another() -> None:
    class Two(Sensitive):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = super().forward(x)
            return {"y": y, "loss": y.square().mean()}

    plain, model = make(Two), make(Two)
    controller = stash.apply(model, "gact", bits=8, adapt_interval=1)
    for _ in range(3):
        for net in (plain, model):
            net.zero_grad()
            out = net(rows())
            (out["y"].sum() + out["loss"]).backward()
        assert error(all_gradients(model), all_gradients(plain)) < 0.05
    assert controller.plan.measured


def test_a_step_that_is_measured_has_the_gradient_that_it_would_have_had() -> None:
    results = []
    for interval in (1, None):
        model = make(Sensitive)
        stash.apply(model, "gact", bits=4, adapt_interval=interval)
        results.append([gradient(model, rows()) for _ in range(2)])
    for measured, unmeasured in zip(*results, strict=True):
        assert torch.equal(measured, unmeasured)


def test_batches_of_changing_shape_stay_within_budget_and_true() -> None:
    model = make(Encoder)
    controller = stash.apply(model, "gact", bits=6)
    for length in (12, 12, 7, 20, 7, 12, 20):
        got = gradient(model, tokens(length, length))
        assert bits_used(controller.report()) <= 6
        assert error(got, gradient(make(Encoder), tokens(length, length))) < 0.1


def test_another_list_of_tensors_is_measured_again() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.deep = nn.Linear(32, 32), nn.Linear(32, 4), False

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.second(torch.tanh(self.first(x)) if self.deep else x)

    model, plain = make(Branch), make(Branch)
    controller = stash.apply(model, "gact", bits=4, adapt_interval=10)
    for number in range(14):
        model.deep = plain.deep = number > 3
        assert error(gradient(model, rows()), gradient(plain, rows())) < 0.2
    assert len(controller.plan.measured) == 2


def test_a_checkpoint_saves_less_and_is_measured() -> None:
    plain, model = make(Encoder), make(Encoder)
    without_checkpoint = stash.apply(model, "gact", bits=8, adapt_interval=2)
    gradient(model, tokens())
    without_checkpoint.remove()
    stash.apply(model, "checkpoint")
    controller = stash.apply(model, "gact", bits=8, adapt_interval=2)
    for number in range(4):
        assert error(gradient(model, tokens(number)), gradient(plain, tokens(number))) < 0.05
    assert controller.plan.measured
    assert controller.report().saved_bytes < without_checkpoint.report().saved_bytes / 4


def test_an_overflow_is_not_measured() -> None:
    model = make(Sensitive)
    controller = stash.apply(model, "gact")
    for _ in range(2):
        model(rows()).mul(float("inf")).sum().backward()
    assert not controller.plan.measured
    gradient(model, rows())
    gradient(model, rows())
    assert controller.plan.measured


def test_a_backward_after_another_forward_is_not_measured() -> None:
    model = make(Sensitive)
    controller = stash.apply(model, "gact")
    gradient(model, rows())
    y = model(rows())
    model(rows(1))
    y.sum().backward()
    assert not controller.plan.measured


def test_behind_a_checkpoint_that_re_enters_nothing_is_measured() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), Checkpointed(make(Sensitive), reentrant=True))
    exact = gradient(model, rows())
    stash.apply(model, "gact")
    assert error(gradient(model, rows()), exact) < 0.1
    with pytest.warns(UserWarning, match="behind checkpoints with use_reentrant=True"):
        assert error(gradient(model, rows()), exact) < 0.1
