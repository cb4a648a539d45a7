"""The reference beyond test_formats.py: short last blocks, fixed point, stochastic rounding by Python's ints."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

import dsq
from dsq.formats import BFP, FixedPoint, Layout, SignedNVInt
from dsq.functional import linear
from dsq.kernels.backend import Groups, MovingRanges
from dsq.kernels.conformance import same_bits
from dsq.kernels.reference import codec as reference
from dsq.kernels.reference.codec import philox
from dsq.kernels.reference.stash import affine_pack
from tests.kernels.test_formats import random_blocks


def test_a_last_block_may_be_short_and_a_row_end_within_a_byte():
    for block_size, bits in ((16, 3), (7, 4), (5, 11)):
        x = random_blocks(222, bits, seed=block_size).view(-1, 37)
        layout, parts = Layout.of(x.shape, -1), x.split(block_size, -1)
        calls = [(part, BFP(bits, part.shape[1]), Layout.of(part.shape, -1), None) for part in parts]
        y = reference.quantize(x, BFP(bits, block_size), layout, None, torch.float32)
        assert same_bits(y, torch.cat([reference.quantize(*call, torch.float32) for call in calls], 1))
        codes, scales = reference.pack(x, BFP(bits, block_size), layout, None)
        assert same_bits(reference.unpack(codes, scales, BFP(bits, block_size), layout, torch.float32)[0], y)
        all_codes, all_scales = zip(*(reference.pack(*call) for call in calls), strict=True)
        assert torch.equal(scales.view(len(x), -1), torch.cat([part.view(len(x), -1) for part in all_scales], 1))
        streams = [
            np.unpackbits(part_codes.numpy(), 1, bitorder="little")[:, : bits * part.shape[1]]
            for part_codes, part in zip(all_codes, parts, strict=True)
        ]
        assert np.array_equal(codes, np.packbits(np.concatenate(streams, 1), 1, bitorder="little"))


@pytest.mark.parametrize("fraction_bits", [0, 3, 20])
def test_a_static_binary_point_is_integer_rounding(fraction_bits):
    bits, x = 8, torch.randn(10, 30) * 100
    fmt = FixedPoint(bits, fraction_bits)
    step = 2.0**-fraction_bits
    expected = (x.double() / step).round().clamp(-127, 127) * step
    y = reference.quantize(x, fmt, Layout.of(x.shape, -1), None, torch.float32)
    assert torch.equal(y.double(), expected)


def test_a_dynamic_binary_point_is_one_block_for_the_tensor():
    x = torch.randn(10, 30)
    as_block = reference.quantize(x.view(1, -1), BFP(6, 300), Layout.of((1, 300), -1), None, torch.float32)
    y = reference.quantize(x, FixedPoint(6), Layout.of(x.shape, -1), None, torch.float32)
    assert torch.equal(y, as_block.view(10, 30))


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


def _slope(y: Tensor, x: Tensor) -> float:
    return float((y.double() * x).sum() / x.double().square().sum())


@pytest.mark.parametrize(("bits", "clipped", "slope"), [(2, 0.180, 0.874), (4, 0.0175, 0.996)])
def test_stochastic_rounding_is_biased_only_where_values_are_clipped(bits: int, clipped: float, slope: float) -> None:
    x = torch.randn(2**14, 16)
    exponents = torch.frexp(x.abs().amax(1, keepdim=True)).exponent - 1
    largest = (2 ** (bits - 1) - 1) * torch.ldexp(torch.ones_like(x[:, :1]), exponents - (bits - 2))
    unclipped = x.abs() <= largest
    samples = [dsq.quantize(x, dsq.BFP(bits), rounding="stochastic", seed=seed) for seed in range(64)]
    mean = torch.stack(samples).mean(0)
    assert (~unclipped).float().mean().item() == pytest.approx(clipped, abs=0.002)
    assert _slope(mean, x) == pytest.approx(slope, abs=0.002)
    assert _slope(mean[unclipped], x[unclipped]) == pytest.approx(1, abs=0.001)
    assert torch.equal(mean[~unclipped].abs(), largest.expand_as(x)[~unclipped])


def test_float32_units_keep_the_products_of_subnormals() -> None:
    x, w = torch.full((1, 16), 2.0**-130), torch.full((1, 16), 2.0**60)
    fastest, float32 = (
        linear(x, w, None, dsq.DSQConfig("[8,8,8,16]", gemm=gemm).at(0)) for gemm in ("exact", "float32")
    )
    assert float32.item() == 16 * 2.0**-70
    assert fastest.item() in (0, float32.item())  # bfloat16 units flush them


def test_nine_bits_are_bfloat16_but_below_its_normal_numbers() -> None:
    exponents = torch.arange(-149, 127)
    q = dsq.quantize(torch.ldexp(1 + torch.rand(len(exponents), 64), exponents[:, None]), dsq.BFP(9))
    is_exact = (q.bfloat16().float() == q).all(1)
    assert is_exact[exponents >= -126].all()
    assert not is_exact[exponents == -127].any()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_running_ranges_do_not_move_if_a_tensor_is_not_finite(value):
    """In a group with infinity the smallest value alone may be finite."""
    ranges = torch.tensor([[2.0, 2.0], [-1.0, -1.0]])
    x = torch.linspace(-1, 1, 16).view(8, 2).contiguous()
    x[0, 0] = value
    packed = affine_pack(x, 8, Groups(1, 2), MovingRanges(ranges, 0.5), None)
    assert ranges[:, 0].tolist() == [2.0, -1.0]
    assert ranges[0, 1] < 2.0
    assert packed.ranges[:, 0].isnan().all()
    assert packed.ranges[:, 1].isfinite().all()
