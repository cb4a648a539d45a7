"""Block floating point with a signed scale, against a statement of it in Python's integers and fractions."""

from fractions import Fraction

import pytest
import torch

import dsq
from dsq.formats import SignedBFP


def box_by_integers(values, bits):
    """Codes and step of one box of floats."""
    exact = [Fraction(value) for value in values]
    largest = max(exact, key=lambda value: (abs(value), value))
    if largest == 0:
        return [0] * len(exact), Fraction(1)
    exponent = -96
    while exponent < 30 and Fraction(2) ** (exponent + 1) * (1 + Fraction(2, 2**bits)) <= abs(largest):
        exponent += 1
    step = Fraction(2) ** (exponent - (bits - 2)) * (-1 if largest > 0 else 1)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return [min(max(round(value / step), low), high) for value in exact], step


@pytest.mark.parametrize("bits", range(2, 17))
def test_codes_and_steps_are_those_of_the_integer_statement(bits):
    generator = torch.Generator().manual_seed(bits)
    x_BV = torch.randn(60, 16, generator=generator) * 2.0 ** torch.randint(-20, 20, (60, 1), generator=generator)
    x_BV[0] = 0
    x_BV[1, 3:5] = torch.tensor([9.0, -9.0])  # equal magnitudes: the positive one counts
    x_BV[2, 0] = 1 + 2.0 ** (1 - bits)  # where the exponent rises
    x_BV[2, 1:] /= 2.0**22
    y_BV = dsq.quantize(x_BV, SignedBFP(bits))
    for x_V, y_V in zip(x_BV, y_BV, strict=True):
        codes, step = box_by_integers(x_V.tolist(), bits)
        assert [Fraction(value) for value in y_V.tolist()] == [code * step for code in codes]


def test_every_code_is_used():
    x = torch.randn(2000, 16)
    codes = dsq.pack(x, SignedBFP(2)).codes
    fields = torch.stack([codes >> shift & 3 for shift in (0, 2, 4, 6)])
    assert fields.unique().tolist() == [0, 1, 2, 3]


def test_a_nan_makes_its_box_nan():
    x = torch.ones(2, 32)
    x[0, 3], x[1, 20] = torch.nan, torch.inf
    broken = dsq.quantize(x, SignedBFP(4)).isnan()
    assert broken.sum() == 32
    assert broken[0, :16].all()
    assert broken[1, 16:].all()


def test_a_layer_trains_with_it_and_dsq_cost_prices_it(capsys):
    from costmodel.cli.main import main

    model = dsq.convert(torch.nn.Linear(32, 8), dsq.DSQConfig(levels="[4,4,4,16]", format="sbfp"))
    model(torch.randn(16, 32)).sum().backward()
    assert model.weight.grad.isfinite().all()
    assert main(["estimate", "[4,4,4,16]", "--format", "sbfp"]) == 0
    assert "sbfp" in capsys.readouterr().out
