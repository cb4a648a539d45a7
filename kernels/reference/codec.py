"""The oracle of quantise, pack and unpack, in float64, on any device. Other backends must give the same bits.

A format's codec is two functions: the scales of a tensor's boxes, and the step that a scale stands for. The rest is
the same for all:

    t    = x / step
    code = clip(round(t), smallest code, largest code)
    x'   = code * step

``round`` is to nearest, ties to even; or stochastic: away from zero when a uniform number lies below the fraction of
``|t|``. A box that holds a NaN or an infinity has the step NaN, and codes of 0. Shape suffixes: O outer, R rows, C
columns (dsq.formats.Layout), B boxes.
"""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple

import torch
from torch import Tensor

from dsq.formats import Format, Layout
from dsq.kernels.reference import bitstream
from dsq.kernels.reference.philox import uniform


class Codec(NamedTuple):
    """What a format is to the kernels."""

    #: (x (O, R, C) float64, format, layout) -> uint8 scales of the format's scale_shape
    scales: Callable[[Tensor, Format, Layout], Tensor]
    #: (scales, format, layout) -> float64 steps, one a box (layout.box_shape)
    steps: Callable[[Tensor, Format, Layout], Tensor]
    #: (x, step) -> t, in the precision that every backend has for it
    divide: Callable[[Tensor, Tensor], Tensor] = torch.div


#: every file of kernels/reference that enters a codec is imported by ``codec_of``
CODECS: dict[type[Format], Codec] = {}


def codec_of(fmt: Format) -> Codec:
    """The codec of the format. Raises TypeError where it has none."""
    if type(fmt) not in CODECS:
        package = __name__.rpartition(".")[0]
        for module in iter_modules(import_module(package).__path__):
            import_module(f"{package}.{module.name}")
    if type(fmt) not in CODECS:
        raise TypeError(f"format {fmt} has no codec in kernels/reference")
    return CODECS[type(fmt)]


def quantize(x: Tensor, fmt: Format, layout: Layout, seed: int | None, dtype: torch.dtype) -> Tensor:
    """``x`` rounded to the grid, as ``dtype``; ``seed`` None rounds to nearest, a number stochastically."""
    codes_ORC, step_ORC, _ = _encode(x, fmt, layout, seed)
    return _decode(codes_ORC, step_ORC, dtype).view(x.shape)


def pack(x: Tensor, fmt: Format, layout: Layout, seed: int | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of ``x`` as uint8 tensors of ``layout.code_shape`` and ``fmt.scale_shape``."""
    codes_ORC, _, scales = _encode(x, fmt, layout, seed)
    return bitstream.pack(codes_ORC.view(layout.outer * layout.rows, layout.columns), fmt.bits), scales


def unpack(codes: Tensor, scales: Tensor, fmt: Format, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The values of packed ``codes`` as ``dtype``, shape (outer, rows, columns)."""
    codes_ORC = bitstream.unpack(codes, fmt.bits, layout.columns).view(layout.outer, layout.rows, layout.columns)
    return _decode(codes_ORC, spread(codec_of(fmt).steps(scales, fmt, layout), fmt, layout), dtype)


def box_reduce(x_ORC: Tensor, fmt: Format, layout: Layout, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """``reduce(values of a box, dim)`` of every box, in ``layout.box_shape``; a short last box is filled with zeros."""
    if fmt.box == 0:
        return reduce(x_ORC.flatten(), 0).view(1) if x_ORC.numel() else x_ORC.new_zeros(1)
    dim = 1 if layout.along_rows else 2
    size = x_ORC.shape[dim]
    box = min(fmt.box, max(size, 1))  # a box longer than the tensor needs no memory for what is not there
    boxes = -(-size // box)
    padding = boxes * box - size
    padded = torch.nn.functional.pad(x_ORC, (0, 0, 0, padding) if layout.along_rows else (0, padding))
    return reduce(padded.unflatten(dim, (boxes, box)), dim + 1).view(layout.box_shape(fmt.box))


def box_extremes(x_ORC: Tensor, fmt: Format, layout: Layout) -> tuple[Tensor, Tensor]:
    """The largest magnitude of every box, and whether a positive value has it."""
    most = box_reduce(x_ORC, fmt, layout, lambda values, dim: values.amax(dim))
    least = box_reduce(x_ORC, fmt, layout, lambda values, dim: values.amin(dim))
    return torch.maximum(most, -least), most >= -least


def spread(box_B: Tensor, fmt: Format, layout: Layout) -> Tensor:
    """A number a box, spread to a shape that broadcasts against (outer, rows, columns)."""
    if fmt.box == 0:
        return box_B.view(1, 1, 1)
    if layout.along_rows:
        return box_B.repeat_interleave(min(fmt.box, max(layout.rows, 1)), dim=1)[:, : layout.rows]
    wide = box_B.repeat_interleave(min(fmt.box, max(layout.columns, 1)), dim=1)[:, : layout.columns]
    return wide.reshape(layout.outer, layout.rows, layout.columns)


def _encode(x: Tensor, fmt: Format, layout: Layout, seed: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (O, R, C) as int64, the step of each, and the stored scales."""
    codec = codec_of(fmt)
    x_ORC = x.to(torch.float32).to(torch.float64).reshape(layout.outer, layout.rows, layout.columns)
    scales = codec.scales(x_ORC, fmt, layout)
    step_ORC = spread(codec.steps(scales, fmt, layout), fmt, layout)
    t = codec.divide(x_ORC, step_ORC)
    if seed is None:
        rounded = torch.round(t)
    else:
        u_RC = uniform(layout.outer * layout.rows, layout.columns, seed, t.device)
        size = torch.where(t < 0, -t.clamp(min=fmt.smallest_code), t.clamp(max=fmt.largest_code))
        whole = size.floor()
        rounded = torch.copysign(whole + (u_RC.view(t.shape) < size - whole), t)
    rounded = rounded.clamp(fmt.smallest_code, fmt.largest_code)
    return torch.where(step_ORC.isnan(), 0.0, rounded).to(torch.int64), step_ORC, scales


def _decode(codes_ORC: Tensor, step_ORC: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes_ORC * step_ORC).to(torch.float32).to(dtype)
