"""Block integers with a signed E4M3 scale, against a statement of them in Python's fractions and numpy's float32."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import dsq
from dsq.formats import SignedNVInt

#: every finite E4M3 value that is not negative (OCP 8-bit floating point, table 1), by its byte
E4M3 = [
    Fraction(m, 8) * Fraction(2) ** -6 if e == 0 else (1 + Fraction(m, 8)) * Fraction(2) ** (e - 7)
    for e in range(16)
    for m in range(8)
][:127]


def nearest_e4m3(value):
    """The byte of the nearest E4M3 value, ties to the even byte; 448 above that."""
    return min(range(len(E4M3)), key=lambda byte: (abs(E4M3[byte] - value), byte % 2))


def tensor_by_fractions(boxes, bits):
    """The values of boxes of floats."""
    top = max(abs(Fraction(value)) for box in boxes for value in box)
    exponent = max(e for e in range(-90, 121) if e == -90 or Fraction(2) ** e <= top)
    unit = Fraction(2) ** (exponent - bits - 6)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    for box in boxes:
        extreme = max((Fraction(value) for value in box), key=lambda value: (abs(value), value))
        size = E4M3[nearest_e4m3(abs(extreme) / 2 ** (bits - 1) / unit)] * unit
        step = np.float32(float(-size if extreme > 0 else size))
        if step == 0:
            yield [0.0] * len(box)
            continue
        inverse = np.float32(1) / step
        codes = [min(max(round(float(np.float32(value) * inverse)), low), high) for value in box]
        yield [code * float(step) for code in codes]


@pytest.mark.parametrize("bits", range(2, 17))
def test_values_are_those_of_the_statement(bits):
    generator = torch.Generator().manual_seed(bits)
    x_BV = torch.randn(40, 16, generator=generator) * 2.0 ** torch.randint(-12, 6, (40, 1), generator=generator)
    x_BV[0] = 0
    x_BV[1, 3:5] = torch.tensor([9.0, -9.0])  # equal magnitudes: the positive one counts
    x_BV[2] *= 1e-7  # its scale is subnormal, or none
    y_BV = dsq.quantize(x_BV, SignedNVInt(bits))
    expected = list(tensor_by_fractions(x_BV.tolist(), bits))
    np.testing.assert_array_equal(y_BV.numpy(), np.array(expected, np.float32))


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_bfloat16_holds_every_value(bits):
    assert SignedNVInt(bits).exact_in_bfloat16
    assert not SignedNVInt(6).exact_in_bfloat16
    y = dsq.quantize(torch.randn(500, 16), SignedNVInt(bits))
    assert torch.equal(y.bfloat16().float(), y)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-38, 1e38])
def test_the_ends_of_the_range_stay_finite(scale):
    y = dsq.quantize(torch.randn(4, 32).clamp(-3, 3) * scale, SignedNVInt(4))
    assert y.isfinite().all()


def test_a_nan_makes_the_tensor_nan():
    x = torch.ones(2, 32)
    x[0, 3] = torch.inf
    assert dsq.quantize(x, SignedNVInt(4)).isnan().all()


def test_it_halves_the_error_of_bfp():
    x = torch.randn(4000, 16, generator=torch.Generator().manual_seed(0))
    error = {fmt: (dsq.quantize(x, fmt(4)) - x).norm() / x.norm() for fmt in (dsq.BFP, SignedNVInt)}
    assert error[SignedNVInt] < 0.7 * error[dsq.BFP]
