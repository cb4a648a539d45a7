"""Quantise a tensor to a format, or pack it into the format's bits."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dsq.arguments import choice, whole_number
from dsq.formats import Format
from dsq.kernels import dispatch

Rounding = Literal["nearest", "stochastic"]


def quantize(x: Tensor, fmt: Format, dim: int = -1, rounding: Rounding = "nearest", seed: int = 0) -> Tensor:
    """Return ``x`` rounded to the grid of ``fmt``, in the shape and dtype of ``x``; detached: autograd sees a constant.

    One NaN or infinity makes its whole box NaN; with one exponent (FixedPoint), the whole tensor. Formats wider than 16
    bits give ``x`` itself, not a copy: a later change in place shows in both.

    Args:
        x: floating tensor of any shape; float64 is rounded to float32 first.
        fmt: BFP, FixedPoint or another of dsq.formats.
        dim: the axis along which the boxes of a BFP run.
        rounding: "nearest" (ties to even) or "stochastic" (unbiased; the same ``seed`` gives the same bits anywhere).
        seed: 64-bit seed of stochastic rounding.
    Raises:
        TypeError: ``x`` is no floating tensor, or ``fmt`` no format.
        ValueError: ``dim`` is no whole number; ``dim`` or ``rounding`` is out of range.
    """
    dim = _check(x, fmt, dim, rounding, seed)
    if not fmt.packs:
        return x.detach()
    return dispatch.quantize(x, fmt, dim, seed if rounding == "stochastic" else None)


@dataclass(frozen=True, eq=False)  # tensors have no single answer to ==
class Packed:
    """A tensor in the bits of its format: what ``pack`` gives."""

    codes: Tensor  #: uint8 bitstream, a row of bytes for each row of the tensor (dsq.formats.Layout), or the values
    scales: Tensor | None  #: uint8, what the boxes share; None where values are kept as they are
    fmt: Format
    shape: torch.Size
    dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes that the packed tensor occupies."""
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def unpack(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the quantised values, in ``dtype`` (default: that of the packed tensor)."""
        dtype = dtype or self.dtype
        if self.scales is None:
            return self.codes.to(dtype)
        return dispatch.unpack(self.codes, self.scales, self.fmt, tuple(self.shape), self.dim, dtype)


def pack(x: Tensor, fmt: Format, dim: int = -1, rounding: Rounding = "nearest", seed: int = 0) -> Packed:
    """Return ``x`` packed into the bits of ``fmt``: ``pack(x, ...).unpack()`` equals ``quantize(x, ...)`` bit for bit.

    A value costs ``bits`` bits, a box one byte more: 4.5 bits a value at 4 bits and boxes of 16. Formats wider than 16
    bits keep ``x`` itself, not a copy: what changes ``x`` in place later changes what is unpacked. NaN, infinity,
    arguments and errors are as for ``quantize``.
    """
    dim = _check(x, fmt, dim, rounding, seed)
    codes, scales = x.detach(), None
    if fmt.packs:
        codes, scales = dispatch.pack(x, fmt, dim, seed if rounding == "stochastic" else None)
    return Packed(codes, scales, fmt, x.shape, dim, x.dtype)


def _check(x: Tensor, fmt: Format, dim: int, rounding: Rounding, seed: int) -> int:
    """Return ``dim`` as an int. Raises what ``quantize`` promises; the kernel alone knows if ``dim`` is in range."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.layout != torch.strided:
        raise TypeError(f"x must be a dense tensor, got one of {x.layout}")
    if not isinstance(fmt, Format):
        raise TypeError(f"fmt must be a format, as dsq.BFP(4), got {fmt!r}")
    if not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {seed!r}")
    choice("rounding", rounding, get_args(Rounding))
    return whole_number("dim", dim)
