"""The gact policy by its numbers: the integer program, budget, sensitivities, variance by Monte Carlo, bytes."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from dsq import stash
from dsq.stash.gact.plan import EXACT, allocate, factor
from tests.dsq.stash.every_policy import SelfAttention
from tests.dsq.stash.gact.models import Encoder, Sensitive, bits_used, make, rows, step, tokens


def variance(model: nn.Module, x: Tensor, draws: int = 30) -> float:
    return torch.stack([step(model, x) for _ in range(draws)]).var(0).sum().item()


def test_allocation_is_the_best_there_is_on_small_cases() -> None:
    widths, sizes = (1, 2, 3, 4), (100, 100, 100, 100)
    for seed in range(5):
        c = torch.rand(4, generator=torch.Generator().manual_seed(seed)).pow(4).tolist()
        bits = allocate(tuple(c), tuple(sizes), 2.5 * 400, tuple(widths))
        schemes = (s for s in itertools.product(widths, repeat=4) if sum(s) <= 10)
        best = min(sum(a * factor(b) for a, b in zip(c, s, strict=True)) for s in schemes)
        assert sum(a * factor(b) for a, b in zip(c, bits, strict=True)) == pytest.approx(best)


def test_allocation_never_exceeds_the_budget_and_uses_it() -> None:
    generator = torch.Generator().manual_seed(0)
    for average in (1.0, 2.0, 2.7, 4.0, 7.9):
        c = torch.rand(30, generator=generator).pow(8).tolist()
        sizes = torch.randint(1, 5000, (30,), generator=generator).tolist()
        bits = allocate(tuple(c), tuple(sizes), average * sum(sizes), tuple(range(1, 9)))
        used = sum(b * d for b, d in zip(bits, sizes, strict=True)) / sum(sizes)
        assert average - 0.15 < used <= average


@pytest.mark.parametrize("bits", [2, 2.5])
@pytest.mark.parametrize("kind, x", [(Sensitive, rows()), (Encoder, tokens())])
def test_average_bits_are_met(kind: type[nn.Module], x: Tensor, bits: float) -> None:
    model = make(kind)
    controller = stash.apply(model, "gact", bits=bits)
    for _ in range(4):
        step(model, x)
    # one of five equal tensors is the least step
    assert bits - 0.2 < bits_used(controller.report()) <= bits


def test_the_report_says_what_the_average_is_of() -> None:
    model = make(Sensitive)
    controller = stash.apply(model, "gact", bits=4)
    firsts = []
    for _ in range(3):
        step(model, rows())
        firsts.append(controller.report().details[0])
    assert firsts[0].startswith("4.000 bits")
    assert "uniform bits within 4" in firsts[0]
    assert "the budget is 4" in firsts[2]


def test_the_sensitive_tensor_gets_more_bits_than_its_like() -> None:
    model = make(Sensitive)
    controller = stash.apply(model, "gact", bits=3)
    for _ in range(3):
        step(model, rows())
    lines = controller.report().details[1:]
    bits = [EXACT if "exact" in line else int(line.split(" bits")[0].split()[-1]) for line in lines]
    # in the order of the forward: the input, three of gelu, their sum
    assert bits[3] > 3 > max(bits[1:3])


def test_sensitivities_predict_the_variance() -> None:
    """Theorem 2: the variances of the tensors add up; c_l S(b) measured at one width holds at another."""
    model = make(Encoder)
    controller = stash.apply(model, "gact", bits=5)
    step(model, tokens())
    step(model, tokens())
    (measured,) = controller.plan.measured.values()
    controller.remove()
    for bits in (4, 6):
        stash_of = stash.apply(model, "gact", bits=bits, adapt_interval=None)
        predicted = sum(measured.c) * factor(bits)
        assert predicted == pytest.approx(variance(model, tokens()), rel=0.4)
        stash_of.remove()


def test_kept_bytes_of_an_encoder_with_dropout() -> None:
    """Masks in one bit, q, k and v's input once, weights not at all: bytes from the shapes alone."""
    model = nn.Sequential(SelfAttention(32, 4, 0.1), nn.Dropout(0.5))
    controller = stash.apply(model, "gact", bits=4, adapt_interval=None)
    model(torch.randn(8, 64, 32, requires_grad=True))
    width, maps = 8 * 64 * 32, 8 * 4 * 64 * 64

    def codes(n: int) -> int:
        return n // 2 + n // 256 * 8

    # input; q (scaled), k, v; the map, from which dropout's result is made again; attention's output; two masks
    assert controller.report().kept_bytes == codes(width) * 5 + codes(maps) + width // 8 + maps // 8
