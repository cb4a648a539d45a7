"""The codec of dsq.formats.signed_bfp: a signed power of two a box.

The byte is E + 96, with 128 added where the step is negative (x_M is positive); 127 and 255 stand for NaN. A box of
zeros has 0.
"""

import torch
from torch import Tensor

from dsq.formats import Format, Layout
from dsq.formats.signed_bfp import HIGHEST_EXPONENT, LOWEST_EXPONENT, SignedBFP
from dsq.kernels.reference.codec import CODECS, Codec, box_extremes
from dsq.kernels.reference.power_of_two import power_of_two

SIGN, NAN = 128, 127


def _scales(x_ORC: Tensor, fmt: Format, layout: Layout) -> Tensor:
    largest, positive = box_extremes(x_ORC, fmt, layout)
    finite = torch.isfinite(largest)
    # both factors are exact in float64, and a quotient next to a power of two is not rounded across it
    exponent = torch.frexp(torch.where(finite, largest, 0.0) / (1 + 2.0 ** (1 - fmt.bits))).exponent - 1
    stored = exponent.clamp(LOWEST_EXPONENT, HIGHEST_EXPONENT) - LOWEST_EXPONENT + SIGN * positive
    stored = torch.where(largest == 0, 0, stored)
    return torch.where(finite, stored, NAN).to(torch.uint8)


def _steps(scales: Tensor, fmt: Format, layout: Layout) -> Tensor:
    exponent = (scales % SIGN).long()
    step = power_of_two(exponent + LOWEST_EXPONENT - (fmt.bits - 2))
    return torch.where(exponent == NAN, torch.nan, torch.where(scales >= SIGN, -step, step))


CODECS[SignedBFP] = Codec(_scales, _steps)
