"""The codec of formats whose step is a power of two: block floating point, and fixed point as one box.

    E    = max floor(log2|x|) over a box, at least -127; 255 - 127 where the box holds a NaN or an infinity
    step = 2**(E - (bits - 2))

The scale is E + 127, a byte; that of a box of zeros is 0.
"""

import torch
from torch import Tensor

from dsq.formats import BFP, FixedPoint, Format, Layout
from dsq.formats.fixed_point import BIAS
from dsq.kernels.reference.codec import CODECS, Codec, box_reduce

#: stored exponent of a box that holds a NaN or an infinity
NAN_EXPONENT = 255


def _scales(x_ORC: Tensor, fmt: Format, layout: Layout) -> Tensor:
    largest = box_reduce(x_ORC.abs(), fmt, layout, lambda values, dim: values.amax(dim))
    finite = torch.isfinite(largest)
    if isinstance(fmt, FixedPoint) and fmt.static_exponent is not None:
        stored = torch.full_like(largest, fmt.static_exponent + BIAS)
    else:
        stored = torch.frexp(torch.where(finite, largest, 0.0)).exponent - 1 + BIAS
        stored = torch.where(largest == 0, 0, stored.clamp(min=0))
    return torch.where(finite, stored, NAN_EXPONENT).to(torch.uint8)


def _steps(scales: Tensor, fmt: Format, layout: Layout) -> Tensor:
    stored = scales.long()
    return torch.where(stored == NAN_EXPONENT, torch.nan, power_of_two(stored - BIAS - (fmt.bits - 2)))


def power_of_two(exponent: Tensor) -> Tensor:
    """2.0**exponent, built from the bits of a float64: exact, which pow and exp2 need not be."""
    return ((exponent + 1023) << 52).view(torch.float64)


CODECS[BFP] = CODECS[FixedPoint] = Codec(_scales, _steps)
