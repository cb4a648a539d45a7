"""The reference against gfloat's MX block formats, and stochastic rounding stated with Python's ints."""

from fractions import Fraction

import gfloat
import numpy as np
import pytest
import torch
from gfloat.block import compute_scale_amax
from gfloat.formats import format_info_ocp_e8m0

import dsq
from dsq.formats import BFP, FixedPoint, Layout, SignedNVInt
from dsq.kernels.reference import codec as reference
from dsq.kernels.reference.codec import philox
from tests.kernels.test_formats import random_boxes


def element(bits):
    """gfloat's OCP INT8 at any width: two's complement, one whole bit, bits - 2 of fraction."""
    finite = {"bias": 0, "has_nz": False, "domain": gfloat.Domain.Finite, "num_high_nans": 0}
    signed = {"has_subnormals": True, "is_signed": True, "is_twos_complement": True}
    return gfloat.FormatInfo(f"int{bits}", k=bits, precision=bits, **finite, **signed)


def boxes_of(x_RN, box):
    return [
        (row, slice(i, min(i + box, x_RN.shape[1]))) for row in range(len(x_RN)) for i in range(0, x_RN.shape[1], box)
    ]


def quantized_by_gfloat(x_RN, bits, box):
    """Boxes along the last axis; gfloat rounds and scales, and codes are kept symmetric."""
    fi, out = element(bits), np.empty(x_RN.shape)
    for place in boxes_of(x_RN, box):
        values = x_RN[place]
        if not np.isfinite(values).all():
            out[place] = np.nan
            continue
        scale = compute_scale_amax(fi.emax, values)
        rounded = gfloat.round_ndarray(fi, values / scale, gfloat.RoundMode.TiesToEven, sat=True)
        out[place] = rounded.clip(-fi.max, fi.max) * scale
    return out


def decoded_by_gfloat(codes, scales, bits, box, columns):
    """The packed rows read as little-endian integers, code by code."""
    rows = [int.from_bytes(row.tobytes(), "little") for row in codes.numpy()]
    points = np.array([[row >> (i * bits) & ((1 << bits) - 1) for i in range(columns)] for row in rows])
    scales = gfloat.decode_ndarray(format_info_ocp_e8m0, scales.numpy().astype(np.int64))
    return gfloat.decode_ndarray(element(bits), points) * np.repeat(scales, box, axis=1)[:, :columns]


def tensors(bits):
    """Rows of 40 float32: every exponent, and boxes of every kind."""
    every_exponent = torch.ldexp(1 + torch.rand(254, 40), torch.arange(-126, 128).view(-1, 1))
    return torch.cat([every_exponent, *(random_boxes(60, bits, seed).view(-1, 40) for seed in range(12))])


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 11, 16])
def test_values_and_bits_are_those_of_gfloat(bits):
    x_RN = tensors(bits)
    assert not x_RN.isfinite().all()
    for box in (16, 7):
        y_RN = reference.quantize(x_RN, BFP(bits, box), Layout.of(x_RN.shape, -1), None, torch.float32)
        np.testing.assert_array_equal(y_RN.double(), quantized_by_gfloat(x_RN.double().numpy(), bits, box))
        assert not torch.signbit(y_RN[y_RN == 0]).any()
    layout, fmt = Layout.of(x_RN.shape, -1), BFP(bits, 16)
    codes, scales = reference.pack(x_RN, fmt, layout, None)
    assert codes.shape == (len(x_RN), -(-40 * bits // 8))
    y_RN = reference.quantize(x_RN, fmt, layout, None, torch.float32)
    np.testing.assert_array_equal(decoded_by_gfloat(codes, scales, bits, 16, 40), y_RN.double())
    assert torch.equal(reference.unpack(codes, scales, fmt, layout, torch.float32)[0].isnan(), y_RN.isnan())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_rounded_from_and_to_float32(dtype):
    x = torch.randn(20, 40).to(dtype)
    layout, fmt = Layout.of(x.shape, -1), BFP(12, 16)
    expected = reference.quantize(x.float(), fmt, layout, None, torch.float32).to(dtype)
    assert torch.equal(reference.quantize(x, fmt, layout, None, dtype), expected)


@pytest.mark.parametrize("fraction_bits", [0, 3, 20])
def test_a_static_binary_point_is_integer_rounding(fraction_bits):
    bits, x = 8, torch.randn(10, 30) * 100
    fmt = FixedPoint(bits, fraction_bits)
    step = 2.0**-fraction_bits
    expected = (x.double() / step).round().clamp(-127, 127) * step
    y = reference.quantize(x, fmt, Layout.of(x.shape, -1), None, torch.float32)
    assert torch.equal(y.double(), expected)


def test_a_dynamic_binary_point_is_one_box_for_the_tensor():
    x = torch.randn(10, 30)
    whole = reference.quantize(x.view(1, -1), BFP(6, 300), Layout.of((1, 300), -1), None, torch.float32)
    y = reference.quantize(x, FixedPoint(6), Layout.of(x.shape, -1), None, torch.float32)
    assert torch.equal(y, whole.view(10, 30))


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_bfloat16_holds_every_value_of_a_narrow_snvint(bits):
    assert SignedNVInt(bits).exact_in_bfloat16
    assert not SignedNVInt(6).exact_in_bfloat16
    y = dsq.quantize(torch.randn(500, 16), SignedNVInt(bits))
    assert torch.equal(y.bfloat16().float(), y)


# ---- stochastic rounding ----


def test_philox_gives_the_published_words():
    # Random123's known answers for philox4x32, 7 and 10 rounds
    zeros, ones = [torch.zeros(1, dtype=torch.int64)] * 4, [torch.tensor([0xFFFFFFFF])] * 4
    pi = [torch.tensor([word]) for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    for counter, seed, rounds, words in [
        (zeros, 0, 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (zeros, 0, 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (ones, 2**64 - 1, 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (pi, 0x299F31D0A4093822, 10, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ]:
        assert " ".join(f"{int(word):08x}" for word in philox(counter, seed, rounds)) == words


@pytest.mark.parametrize("seed", [0, 12345678901234567890])
def test_stochastic_rounding_value_by_value(seed):
    bits, x = 4, torch.randn(3, 150)
    fmt, layout = BFP(bits, 16), Layout.of(x.shape, -1)
    _, scales = reference.pack(x, fmt, layout, None)
    y = reference.quantize(x, fmt, layout, seed, torch.float32)
    for row in range(3):
        for column in range(150):
            block, j, lane = column // 128, column % 128 // 16, column % 16
            word = int(philox([torch.tensor([n]) for n in (16 * block + lane, row, 0, 0)], seed, 7)[j // 2])
            uniform = Fraction(2 * (word >> 16 * (j % 2) & 0xFFFF) + 1, 2**17)
            step = Fraction(2) ** (int(scales[row, column // 16]) - 127 - (bits - 2))
            t = abs(Fraction(float(x[row, column]))) / step
            code = min(t // 1 + (uniform < t - t // 1), 7)
            assert abs(float(y[row, column])) == code * step
