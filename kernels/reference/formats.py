"""Each format as the kernels see it: the scales of a tensor's blocks, and the step that a scale stands for.

A new format adds its two functions here and a line of SCALINGS. Shape suffixes: O outer, R rows, C columns
(dsq.formats.Layout), B blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dsq.formats import BFP, BIAS, FixedPoint, Format, Layout, SignedNVInt


class Scaling(NamedTuple):
    """A format as the kernels see it."""

    #: (x (O, R, C) float64, format, layout) -> uint8 scales of the format's scale_shape
    scales: Callable[[Tensor, Format, Layout], Tensor]
    #: (scales, format, layout) -> float64 steps, one a block (layout.block_shape)
    steps: Callable[[Tensor, Format, Layout], Tensor]
    #: (x, step) -> x / step, in the precision that every backend has for it
    divide: Callable[[Tensor, Tensor], Tensor] = torch.div


def scaling_of(fmt: Format) -> Scaling:
    """Return the scaling of the format. Raises TypeError if it has none."""
    if type(fmt) not in SCALINGS:
        raise TypeError(f"format {fmt} has no scaling in kernels/reference/formats.py")
    return SCALINGS[type(fmt)]


def _block_reduce(x_ORC: Tensor, fmt: Format, layout: Layout, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return ``reduce(values of a block, dim)`` of every block, in ``layout.block_shape``; a short last block is filled
    with zeros."""
    if fmt.block_size == 0:
        return reduce(x_ORC.flatten(), 0).view(1) if x_ORC.numel() else x_ORC.new_zeros(1)
    dim = 1 if layout.along_rows else 2
    size = x_ORC.shape[dim]
    # a block longer than the tensor needs no memory for what is not there
    block_size = min(fmt.block_size, max(size, 1))
    blocks = -(-size // block_size)
    padding = blocks * block_size - size
    padded = torch.nn.functional.pad(x_ORC, (0, 0, 0, padding) if layout.along_rows else (0, padding))
    return reduce(padded.unflatten(dim, (blocks, block_size)), dim + 1).view(layout.block_shape(fmt.block_size))


def _block_extremes(x_ORC: Tensor, fmt: Format, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude of every block, and whether a positive value has it."""
    highest = _block_reduce(x_ORC, fmt, layout, lambda values, dim: values.amax(dim))
    lowest = _block_reduce(x_ORC, fmt, layout, lambda values, dim: values.amin(dim))
    return torch.maximum(highest, -lowest), highest >= -lowest


def _float64_power(exponent: Tensor) -> Tensor:
    """Return 2.0**exponent, built from the bits of a float64: exact, which pow and exp2 need not be."""
    return ((exponent + 1023) << 52).view(torch.float64)


# ---- a power of two a block: block floating point, and fixed point as one block
#
#     E    = max floor(log2|x|) over a block, at least -127; 255 - 127 if the block holds a NaN or an infinity
#     step = 2**(E - (bits - 2))
#
# The scale is E + 127, a byte; that of a block of zeros is 0.

#: stored exponent of a block that holds a NaN or an infinity
NAN_EXPONENT = 255


def _power_scales(x_ORC: Tensor, fmt: Format, layout: Layout) -> Tensor:
    largest = _block_reduce(x_ORC.abs(), fmt, layout, lambda values, dim: values.amax(dim))
    finite = torch.isfinite(largest)
    if isinstance(fmt, FixedPoint) and fmt.static_exponent is not None:
        stored = torch.full_like(largest, fmt.static_exponent + BIAS)
    else:
        stored = torch.frexp(torch.where(finite, largest, 0.0)).exponent - 1 + BIAS
        stored = torch.where(largest == 0, 0, stored.clamp(min=0))
    return torch.where(finite, stored, NAN_EXPONENT).to(torch.uint8)


def _power_steps(scales: Tensor, fmt: Format, layout: Layout) -> Tensor:
    stored = scales.long()
    return torch.where(stored == NAN_EXPONENT, torch.nan, _float64_power(stored - BIAS - (fmt.bits - 2)))


# ---- a signed E4M3 number a block, a power of two a tensor: dsq.formats.SignedNVInt
#
# Every number is computed in float32, as every backend does: the quotient by the tensor's power of two is exact, a step
# is a float32, and a value is multiplied by the rounded inverse of its step.

#: added to the scale of a block whose step is negative, as x_M is positive
SIGN = 128
LARGEST_E4M3 = 448.0


def _e4m3_scales(x_ORC: Tensor, fmt: Format, layout: Layout) -> Tensor:
    lowest, highest = SignedNVInt.exponents
    largest, positive = _block_extremes(x_ORC, fmt, layout)
    top = largest.amax() if largest.numel() else x_ORC.new_zeros(())
    finite = torch.isfinite(top)
    exponent = torch.frexp(torch.where(finite, top, 0.0)).exponent.long() - 1
    exponent = torch.where(top == 0, lowest, exponent.clamp(lowest, highest))
    size = torch.where(finite, largest, 0.0) * 2.0 ** (1 - fmt.bits) / _unit(exponent, fmt)
    e4m3 = size.clamp(max=LARGEST_E4M3).float().to(torch.float8_e4m3fn).view(torch.uint8)
    blocks = (e4m3 + SIGN * (positive & (e4m3 > 0))).to(torch.uint8).flatten()
    tensor = torch.where(finite, exponent + BIAS, NAN_EXPONENT).to(torch.uint8).view(1)
    return torch.cat([blocks, tensor])


def _e4m3_steps(scales: Tensor, fmt: Format, layout: Layout) -> Tensor:
    blocks, tensor = scales[:-1].long(), scales[-1].long()
    field, mantissa = blocks % SIGN >> 3, blocks & 7  # 127, which no kernel writes, is 480 here, not OCP's NaN
    size = torch.where(field == 0, 2 * mantissa, 8 + mantissa) * _float64_power(field - 10)
    size *= _unit((tensor - BIAS).clamp(*SignedNVInt.exponents), fmt)
    step = torch.where(blocks >= SIGN, -size, size)
    return torch.where(tensor == NAN_EXPONENT, torch.nan, step).view(layout.block_shape(fmt.block_size))


def _unit(exponent: Tensor, fmt: Format) -> Tensor:
    """Return T of dsq.formats.SignedNVInt."""
    return _float64_power(exponent - fmt.bits - 6)


def _e4m3_divide(x_ORC: Tensor, step_ORC: Tensor) -> Tensor:
    step = step_ORC.float()
    return torch.where(step == 0, 0.0, x_ORC.float() * (1 / step)).double()


SCALINGS: dict[type[Format], Scaling] = {
    BFP: Scaling(_power_scales, _power_steps),
    FixedPoint: Scaling(_power_scales, _power_steps),
    SignedNVInt: Scaling(_e4m3_scales, _e4m3_steps, _e4m3_divide),
}
