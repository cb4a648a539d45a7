"""Quantize a tensor to a format, or pack it into the format's bits."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dsq.arguments import choice, whole_number
from dsq.formats import Format, parse_format
from dsq.kernels import dispatch

Rounding = Literal["nearest", "stochastic"]


def quantize(x: Tensor, fmt: Format | str, dim: int = -1, rounding: Rounding = "nearest", seed: int = 0) -> Tensor:
    """Return ``x`` rounded to the grid of ``fmt``, in the shape and dtype of ``x``; detached: autograd sees a constant.

    One NaN or infinity makes its whole block NaN; with a scale for the tensor (FixedPoint, NVFP4), the whole tensor.
    Formats that leave values in floating point (Identity; FixedPoint wider than 16 bits) give ``x`` itself, not a copy:
    a later change in place shows in both.

    Args:
        x: floating tensor of any shape; float64 is rounded to float32 first.
        fmt: a format of dsq.formats, as ``dsq.BFP(4)``, or its name: "mxfp4", "nvfp4", "bfp4", "mxfp8_e4m3:ceil".
        dim: the axis along which blocks run; the rows of two-dimensional ones are those of the other axes.
        rounding: "nearest" (ties to even) or "stochastic" (unbiased but for values above the largest that the scale
            leaves, as in mxfp4; the same ``seed`` gives the same bits anywhere).
        seed: 64-bit seed of stochastic rounding.
    Raises:
        TypeError: ``x`` is no floating tensor, or ``fmt`` no format.
        ValueError: an unknown name; ``dim`` is no whole number; ``dim`` or ``rounding`` is out of range.
    """
    fmt, dim = _check(x, fmt, dim, rounding, seed)
    if not fmt.quantizes:
        return x.detach()
    return dispatch.quantize(x, fmt, dim, seed if rounding == "stochastic" else None)


@dataclass(frozen=True, eq=False)  # tensors have no single answer to ==
class Packed:
    """A tensor in the bits of its format: what ``pack`` gives."""

    codes: Tensor  #: uint8 bitstream, a row of bytes for each row of the tensor (dsq.formats.Layout), or the values
    scales: Tensor | None  #: uint8, what the blocks share; None if values are saved as they are
    fmt: Format
    shape: torch.Size
    dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes that the packed tensor occupies."""
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def unpack(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the quantized values, in ``dtype`` (default: that of the packed tensor)."""
        dtype = dtype or self.dtype
        if self.scales is None:
            return self.codes.to(dtype)
        return dispatch.unpack(self.codes, self.scales, self.fmt, tuple(self.shape), self.dim, dtype)


def pack(x: Tensor, fmt: Format | str, dim: int = -1, rounding: Rounding = "nearest", seed: int = 0) -> Packed:
    """Return ``x`` packed into the bits of ``fmt``: ``pack(x, ...).unpack()`` equals ``quantize(x, ...)`` bit for bit.

    A value costs ``bits`` bits, and a block one byte more: 4.5 bits a value of NVFP4, or of BFP(4) in blocks of 16.
    Formats wider than 16 bits store the quantized values, as ``quantize`` gives them. NaN, infinity, arguments and
    errors are as for ``quantize``.
    """
    fmt, dim = _check(x, fmt, dim, rounding, seed)
    if not fmt.packs:
        return Packed(quantize(x, fmt, dim, rounding, seed), None, fmt, x.shape, dim, x.dtype)
    codes, scales = dispatch.pack(x, fmt, dim, seed if rounding == "stochastic" else None)
    return Packed(codes, scales, fmt, x.shape, dim, x.dtype)


def _check(x: Tensor, fmt: Format | str, dim: int, rounding: Rounding, seed: int) -> tuple[Format, int]:
    """Return the format, and ``dim`` as an int. Raises what ``quantize`` promises; the kernel alone knows if ``dim`` is
    in range."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.layout != torch.strided:
        raise TypeError(f"x must be a dense tensor, got one of {x.layout}")
    if isinstance(fmt, str) and fmt.endswith("~"):  # as levels write it
        raise ValueError(f"fmt must have no ~: rounding='stochastic' rounds stochastically, got {fmt!r}")
    fmt = parse_format(fmt) if isinstance(fmt, str) else fmt
    if not isinstance(fmt, Format):
        raise TypeError(f"fmt must be a format, as dsq.BFP(4), or its name, got {fmt!r}")
    if not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {seed!r}")
    choice("rounding", rounding, get_args(Rounding))
    return fmt, whole_number("dim", dim)
