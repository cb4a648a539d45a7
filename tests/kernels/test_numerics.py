"""Where unbiased rounding and exact products end: the figures of docs/reliability.md."""

import pytest
import torch
from torch import Tensor

import dsq
from dsq.functional import linear


def _slope(y: Tensor, x: Tensor) -> float:
    return float((y.double() * x).sum() / x.double().square().sum())


@pytest.mark.parametrize(("bits", "clipped", "slope"), [(2, 0.180, 0.874), (4, 0.0175, 0.996)])
def test_stochastic_rounding_is_biased_only_where_values_are_clipped(bits: int, clipped: float, slope: float) -> None:
    x = torch.randn(2**14, 16)
    exponents = torch.frexp(x.abs().amax(1, keepdim=True)).exponent - 1
    most = (2 ** (bits - 1) - 1) * torch.ldexp(torch.ones_like(x[:, :1]), exponents - (bits - 2))
    inside = x.abs() <= most
    drawn = [dsq.quantize(x, dsq.BFP(bits), rounding="stochastic", seed=seed) for seed in range(64)]
    mean = torch.stack(drawn).mean(0)
    assert (~inside).float().mean().item() == pytest.approx(clipped, abs=0.002)
    assert _slope(mean, x) == pytest.approx(slope, abs=0.002)
    assert _slope(mean[inside], x[inside]) == pytest.approx(1, abs=0.001)
    assert torch.equal(mean[~inside].abs(), most.expand_as(x)[~inside])


def test_float32_units_keep_the_products_of_subnormals() -> None:
    x, w = torch.full((1, 16), 2.0**-130), torch.full((1, 16), 2.0**60)
    exact, kept = (linear(x, w, None, dsq.DSQConfig("[8,8,8,16]", units=it).at(0)) for it in ("exact", "float32"))
    assert kept.item() == 16 * 2.0**-70
    assert exact.item() in (0, kept.item())  # bfloat16 units flush them


def test_nine_bits_are_bfloat16_but_below_its_normal_numbers() -> None:
    exponents = torch.arange(-149, 127)
    q = dsq.quantize(torch.ldexp(1 + torch.rand(len(exponents), 64), exponents[:, None]), dsq.BFP(9))
    exact = (q.bfloat16().float() == q).all(1)
    assert exact[exponents >= -126].all()
    assert not exact[exponents == -127].any()
