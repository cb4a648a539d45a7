"""Exact 1-bit masks: all that the backward of ReLU and dropout needs of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

#: eight bytes of 0 or 1, read as one little-endian integer and multiplied by this, leave their bits in the top byte
_GATHER = 0x0102040810204080


@dataclass(frozen=True)
class Layout:
    """Shape and strides of a tensor, so that what is unpacked lies in memory as what was saved (channels last, say)."""

    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        """The layout of ``x`` where it is dense; that of its contiguous copy where it is a strided view."""
        stride = x.stride() if is_dense(x) else torch.empty(x.shape, device="meta").stride()
        return cls(x.shape, stride)

    def restore(self, flat: Tensor) -> Tensor:
        """A flat tensor in memory order, in this layout."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())


def is_dense(x: Tensor) -> bool:
    """Whether the elements of ``x`` fill one stretch of memory, in any order of its axes."""
    expected = 1
    for stride, size in sorted((st, s) for st, s in zip(x.stride(), x.shape, strict=True) if s > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def flat(x: Tensor) -> Tensor:
    """The elements of ``x`` in memory order, (N,): a view where ``x`` is dense, else a copy."""
    x = x.detach()
    return x.as_strided((x.numel(),), (1,)) if is_dense(x) else x.contiguous().view(-1)


@dataclass(frozen=True)
class Mask:
    """A boolean tensor in one bit an element, ceil(N / 8) bytes; bit i % 8 of byte i // 8 is element i of memory."""

    bits: Tensor  #: uint8
    layout: Layout

    @classmethod
    def pack(cls, mask: Tensor) -> Mask:
        """``mask`` (bool, any shape) in bits."""
        flags_N = flat(mask)
        if flags_N.device.type == "cpu":
            bits = torch.from_numpy(np.packbits(flags_N.numpy(), bitorder="little")).clone()  # clone: PyTorch's memory
        else:
            bits = gather_bits(F.pad(flags_N.view(torch.uint8), (0, -flags_N.numel() % 8)))
        return cls(bits, Layout.of(mask))

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def unpack(self) -> Tensor:
        """The boolean tensor."""
        numel = self.layout.shape.numel()
        if self.bits.device.type == "cpu":
            bytes_N = torch.from_numpy(np.unpackbits(self.bits.numpy(), bitorder="little"))
        else:
            bytes_N = spread_bits(self.bits)
        return self.layout.restore(bytes_N[:numel].view(torch.bool))


def gather_bits(bytes_8N: Tensor) -> Tensor:
    """uint8 0 or 1, a multiple of 8 of them, into bits: (8N,) -> (N,) uint8."""
    return (bytes_8N.view(torch.int64) * _GATHER >> 56).to(torch.uint8)


def spread_bits(bits_N: Tensor) -> Tensor:
    """The inverse: (N,) uint8 -> (8N,) uint8 0 or 1."""
    return (bits_N[:, None] >> torch.arange(8, device=bits_N.device, dtype=torch.uint8) & 1).view(-1)


@dataclass(frozen=True)
class TwoValued:
    """A floating tensor of two values, one bit an element."""

    mask: Mask
    closed: float  #: the value where the mask is 0, exactly
    open: float  #: the value where it is 1, exactly if closed is 0
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.mask.nbytes

    def get(self) -> Tensor:
        """The tensor, as it was laid out."""
        values = self.mask.unpack().view(torch.int8).to(self.dtype)  # int8: from bool it is six times slower on CPUs
        if self.open - self.closed != 1.0:
            values.mul_(self.open - self.closed)
        return values if self.closed == 0.0 else values.add_(self.closed)


@dataclass(frozen=True)
class PackedBool:
    """A boolean tensor, one bit an element."""

    mask: Mask

    @property
    def nbytes(self) -> int:
        return self.mask.nbytes

    def get(self) -> Tensor:
        """The tensor, as it was laid out."""
        return self.mask.unpack()


def scaled_mask(x: Tensor) -> TwoValued | None:
    """``x`` in one bit an element, if its values are 0 and one positive number (dropout noise on the CPU), or None."""
    values = flat(x)
    if values.numel() < 8:
        return None
    head = values[:256]  # nearly every other tensor is told apart here
    scale = head.amax()
    if not bool(scale > 0) or not bool(((head == 0) | (head == scale)).all()):
        return None
    open_N = values != 0
    if not torch.equal(open_N * scale, values):
        return None
    return TwoValued(Mask.pack(Layout.of(x).restore(open_N)), 0.0, scale.item(), x.dtype)
