"""Every float32, in boxes of 16, against BFP's definition in integers: 2^32 values at each of three widths."""

import numpy as np
import pytest
import torch

import dsq

BOX = 16
SLICES = 16
CHUNK = 1 << 18


def boxes(first: int) -> np.ndarray:
    """CHUNK float32 in boxes, as bits (B, BOX). Over all of them each float32 comes once. The values of a box differ in
    the lowest bit of their exponent and the top three of their significand."""
    number = np.arange(first, first + CHUNK, dtype=np.uint32)
    return (number << np.uint32(20) | number >> np.uint32(12)).reshape(-1, BOX)


def expected(bits_BX: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The stored exponents (B,), and the values as bits of float32, of boxes without a NaN or an infinity.

    A float32 is +-M 2^(q - 150) with M a whole number below 2^24 and q in 1..254. A code is M 2^(q - 150) / step,
    rounded to the nearest, ties to even, and clipped.
    """
    exponent_BX = (bits_BX >> 23 & 0xFF).astype(np.int32)
    m_BX = (bits_BX & 0x7FFFFF).astype(np.int32) | (exponent_BX > 0).astype(np.int32) << 23
    scale_B = exponent_BX.max(1)  # the largest value's; 0 of a subnormal, whose E is -127 at least
    q_step_B = scale_B - 127 - (width - 2) + 150  # the step is 2^(q_step - 150)
    shift_BX = np.minimum(q_step_B[:, None] - np.maximum(exponent_BX, 1), 25)  # 25 leaves nothing of M
    odd_BX = m_BX >> shift_BX & 1
    code_BX = np.minimum((m_BX + (1 << shift_BX - 1) - 1 + odd_BX) >> shift_BX, 2 ** (width - 1) - 1)
    signed_BX = np.where(bits_BX >> 31, -code_BX, code_BX).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # boxes that do not count
        return scale_B, (signed_BX * np.ldexp(np.float32(1), q_step_B - 150)[:, None]).view(np.uint32)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(SLICES))
@pytest.mark.parametrize("width", [2, 4, 8])
def test_every_float(width: int, part: int) -> None:
    values = 2**32 // SLICES
    for first in range(part * values, (part + 1) * values, CHUNK):
        check(first, width)


@pytest.mark.parametrize("width", range(2, 17))
def test_some_floats(width: int) -> None:
    for first in (0, 5 << 28, 15 << 28):
        check(first, width)


def check(first: int, width: int) -> None:
    """Hold a chunk of floats against the statement."""
    bits_BX = boxes(first)
    packed = dsq.pack(torch.from_numpy(bits_BX.view(np.float32).ravel()), dsq.BFP(width, BOX))
    values_BX = packed.unpack(torch.float32).view(-1, BOX).numpy()
    scale_B, expected_BX = expected(bits_BX, width)
    broken_B = scale_B == 0xFF
    assert np.array_equal(packed.scales.numpy().ravel(), scale_B)
    assert np.isnan(values_BX[broken_B]).all()
    assert np.array_equal(values_BX.view(np.uint32)[~broken_B], expected_BX[~broken_B])
