"""The codec of dsq.formats.signed_nvint: a signed E4M3 scale a box, a power of two a tensor.

Every number below is computed in float32, as every backend does: the quotient by the tensor's power of two is exact, a
step is a float32, and a value is multiplied by the rounded inverse of its step.
"""

import torch
from torch import Tensor

from dsq.formats import Format, Layout
from dsq.formats.fixed_point import BIAS
from dsq.formats.signed_nvint import HIGHEST_EXPONENT, LOWEST_EXPONENT, SignedNVInt
from dsq.kernels.reference.codec import CODECS, Codec, box_extremes
from dsq.kernels.reference.power_of_two import NAN_EXPONENT, power_of_two

SIGN = 128  #: of the byte: the step is negative, as x_M is positive
LARGEST_E4M3 = 448.0


def _scales(x_ORC: Tensor, fmt: Format, layout: Layout) -> Tensor:
    largest, positive = box_extremes(x_ORC, fmt, layout)
    top = largest.amax() if largest.numel() else x_ORC.new_zeros(())
    finite = torch.isfinite(top)
    exponent = torch.frexp(torch.where(finite, top, 0.0)).exponent.long() - 1
    exponent = torch.where(top == 0, LOWEST_EXPONENT, exponent.clamp(LOWEST_EXPONENT, HIGHEST_EXPONENT))
    size = torch.where(finite, largest, 0.0) * 2.0 ** (1 - fmt.bits) / _unit(exponent, fmt)
    e4m3 = size.clamp(max=LARGEST_E4M3).float().to(torch.float8_e4m3fn).view(torch.uint8)
    boxes = (e4m3 + SIGN * (positive & (e4m3 > 0))).to(torch.uint8).flatten()
    tensor = torch.where(finite, exponent + BIAS, NAN_EXPONENT).to(torch.uint8).view(1)
    return torch.cat([boxes, tensor])


def _steps(scales: Tensor, fmt: Format, layout: Layout) -> Tensor:
    boxes, tensor = scales[:-1], scales[-1].long()
    size = (boxes % SIGN).view(torch.float8_e4m3fn).double() * _unit(tensor - BIAS, fmt)
    step = torch.where(boxes >= SIGN, -size, size)
    return torch.where(tensor == NAN_EXPONENT, torch.nan, step).view(layout.box_shape(fmt.box))


def _unit(exponent: Tensor, fmt: Format) -> Tensor:
    """T of dsq.formats.signed_nvint."""
    return power_of_two(exponent - fmt.bits - 6)


def _divide(x_ORC: Tensor, step_ORC: Tensor) -> Tensor:
    step = step_ORC.float()
    return torch.where(step == 0, 0.0, x_ORC.float() * (1 / step)).double()


CODECS[SignedNVInt] = Codec(_scales, _steps, _divide)
