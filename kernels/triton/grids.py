"""What a format is to the GPU kernels, in Triton: a Grid of functions, as kernels/reference has a codec for it.

A scale is the byte that a box stores; ``tensor`` is the exponent of the whole tensor, where the format stores one.
Scales, keys and values may have any shape that broadcasts against each other.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from dsq.formats.signed_bfp import HIGHEST_EXPONENT as _HIGHEST_EXPONENT
from dsq.formats.signed_bfp import LOWEST_EXPONENT as _LOWEST_EXPONENT
from dsq.kernels.reference.power_of_two import NAN_EXPONENT as _NAN_EXPONENT
from dsq.kernels.reference.signed_bfp import NAN as _SIGNED_NAN
from dsq.kernels.reference.signed_bfp import SIGN as _SIGN
from dsq.kernels.reference.signed_nvint import LARGEST_E4M3 as _LARGEST_E4M3
from dsq.kernels.triton.tiles import BIAS, magnitude, times_power

# a kernel reads a global only as a tl.constexpr
NAN_EXPONENT = tl.constexpr(_NAN_EXPONENT)
SIGN = tl.constexpr(_SIGN)
SIGNED_NAN = tl.constexpr(_SIGNED_NAN)
LOWEST_EXPONENT = tl.constexpr(_LOWEST_EXPONENT)
HIGHEST_EXPONENT = tl.constexpr(_HIGHEST_EXPONENT)
INFINITY = tl.constexpr(0x7F800000)
LARGEST_E4M3 = tl.constexpr(_LARGEST_E4M3)


class Grid(NamedTuple):
    """Functions of ``triton.jit``; all are given BITS."""

    key: JITFunction  #: (x) -> a number a value: that of a box's largest value is the box's largest
    scale: JITFunction  #: (largest key of a box, tensor) -> the box's scale
    is_nan: JITFunction  #: (scale, tensor) -> whether the box is NaN
    divide: JITFunction  #: (x, scale, tensor) -> x / step; anything where the box is NaN
    multiply: JITFunction  #: (code as a float, scale, tensor) -> code * step; NaN where the box is
    exponent_mask: int  #: the bits of a scale that are its step's exponent; 0: a step has a significand too

    @property
    def cache_key(self) -> str:
        """By which Triton tells compiled kernels apart: without it an edit of a function above would go unseen."""
        return "".join(part.cache_key if isinstance(part, JITFunction) else str(part) for part in self)


@triton.jit
def _power_key(x, BITS: tl.constexpr):
    return magnitude(x)


@triton.jit
def _power_scale(key, tensor, BITS: tl.constexpr):
    return key >> 23


@triton.jit
def _power_is_nan(scale, tensor, BITS: tl.constexpr):
    return scale == NAN_EXPONENT


@triton.jit
def _power_divide(x, scale, tensor, BITS: tl.constexpr):
    return times_power(x, 1.0, -(scale - (BIAS + BITS - 2)))


@triton.jit
def _power_multiply(code, scale, tensor, BITS: tl.constexpr):
    unit = tl.where(scale == NAN_EXPONENT, float("nan"), 1.0)
    return times_power(code, unit, scale - (BIAS + BITS - 2))


#: dsq.kernels.reference.power_of_two
POWER = Grid(_power_key, _power_scale, _power_is_nan, _power_divide, _power_multiply, exponent_mask=255)


@triton.jit
def _signed_key(x, BITS: tl.constexpr):
    """The bits of |x| above one that says that x is positive."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits << 1) | (bits >> 31)) ^ 1


@triton.jit
def _signed_power_scale(key, tensor, BITS: tl.constexpr):
    size = (key >> 1).to(tl.int32)
    # the exponent, or one less where the significand is below that of 1 + 2^(1-bits)
    exponent = ((size - (1 << (24 - BITS))) >> 23) - (BIAS + LOWEST_EXPONENT)
    exponent = tl.minimum(tl.maximum(exponent, 0), HIGHEST_EXPONENT - LOWEST_EXPONENT)
    scale = tl.where(size == 0, 0, exponent + (key & 1).to(tl.int32) * SIGN)
    return tl.where(size >= INFINITY, SIGNED_NAN, scale)


@triton.jit
def _signed_power_is_nan(scale, tensor, BITS: tl.constexpr):
    return (scale & (SIGN - 1)) == SIGNED_NAN


@triton.jit
def _signed_power_divide(x, scale, tensor, BITS: tl.constexpr):
    size = (-(scale & (SIGN - 1)) + (BIAS - LOWEST_EXPONENT + BITS - 2)) << 23
    return x * (size | _sign_bit(scale)).to(tl.float32, bitcast=True)


@triton.jit
def _signed_power_multiply(code, scale, tensor, BITS: tl.constexpr):
    size = ((scale & (SIGN - 1)) + (BIAS + LOWEST_EXPONENT - (BITS - 2))) << 23
    size = tl.where(_signed_power_is_nan(scale, tensor, BITS), INFINITY + 1, size)
    return code * (size | _sign_bit(scale)).to(tl.float32, bitcast=True)


@triton.jit
def _sign_bit(scale):
    return (scale & SIGN) << 24


#: dsq.kernels.reference.signed_bfp
SIGNED_POWER = Grid(
    _signed_key,
    _signed_power_scale,
    _signed_power_is_nan,
    _signed_power_divide,
    _signed_power_multiply,
    exponent_mask=SIGN.value - 1,
)


@triton.jit
def _e4m3_scale(key, tensor, BITS: tl.constexpr):
    # |x_M| / 2^(bits-1) / T, whose bits do not depend on the width
    x = (key >> 1).to(tl.float32, bitcast=True) * ((-tensor + (2 * BIAS + 7)) << 23).to(tl.float32, bitcast=True)
    x = tl.minimum(x, LARGEST_E4M3)
    bits = x.to(tl.int32, bitcast=True)
    subnormal = (x + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # in units of 2^-9, the last place of 2^14
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((BIAS - 7) << 3)
    e4m3 = tl.where(x < 0.015625, subnormal, normal)
    scale = e4m3 + tl.where(e4m3 > 0, (key & 1).to(tl.int32) * SIGN, 0)
    return tl.where(tensor == NAN_EXPONENT, 0, scale)


@triton.jit
def _e4m3_is_nan(scale, tensor, BITS: tl.constexpr):
    return tl.zeros_like(scale) + tensor == NAN_EXPONENT


@triton.jit
def _e4m3_divide(x, scale, tensor, BITS: tl.constexpr):
    step = _e4m3_step(scale, tensor, BITS)
    return x * tl.where(step == 0, 0.0, tl.div_rn(1.0, step))


@triton.jit
def _e4m3_multiply(code, scale, tensor, BITS: tl.constexpr):
    return code * tl.where(_e4m3_is_nan(scale, tensor, BITS), float("nan"), _e4m3_step(scale, tensor, BITS))


@triton.jit
def _e4m3_step(scale, tensor, BITS: tl.constexpr):
    size = scale & (SIGN - 1)
    lowest = tensor - 7 - BITS - 6  # exponent of the step, biased, where that of the E4M3 number is stored as 0
    subnormal = size.to(tl.float32) * ((lowest - 2) << 23).to(tl.float32, bitcast=True)
    bits = tl.where(size < 8, subnormal.to(tl.int32, bitcast=True), (size << 20) + (lowest << 23))
    return (bits | _sign_bit(scale)).to(tl.float32, bitcast=True)


#: dsq.kernels.reference.signed_nvint
SIGNED_E4M3 = Grid(_signed_key, _e4m3_scale, _e4m3_is_nan, _e4m3_divide, _e4m3_multiply, exponent_mask=0)
