"""Exact 1-bit masks: all that the backward of ReLU and dropout needs of a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.stash.saved import MemoryOrder

#: eight bytes of 0 or 1, read as one little-endian integer and multiplied by this, leave their bits in the top byte
_GATHER = 0x0102040810204080


@dataclass(frozen=True)
class Mask:
    """A boolean tensor in one bit an element, ceil(N / 8) bytes; bit i % 8 of byte i // 8 is element i of memory."""

    bits: Tensor  #: uint8
    order: MemoryOrder

    @classmethod
    def pack(cls, mask: Tensor) -> Mask:
        """``mask`` (bool, any shape) in bits."""
        order, flags = MemoryOrder.of(mask)
        return cls(bits_of(flags.reshape(-1)), order)

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def unpack(self) -> Tensor:
        """The boolean tensor."""
        if self.bits.device.type == "cpu":
            bytes_N = torch.from_numpy(np.unpackbits(self.bits.numpy(), bitorder="little"))
        else:
            bytes_N = spread_bits(self.bits)
        return self.order.restore(bytes_N[: math.prod(self.order.sizes)].view(torch.bool))


def bits_of(flags_N: Tensor) -> Tensor:
    """bool (N,) -> uint8 (ceil(N / 8),)."""
    if flags_N.device.type == "cpu":
        return torch.from_numpy(np.packbits(flags_N.numpy(), bitorder="little")).clone()  # clone: PyTorch's memory
    return gather_bits(F.pad(flags_N.view(torch.uint8), (0, -flags_N.numel() % 8)))


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
    order, values = MemoryOrder.of(x)
    values = values.reshape(-1)
    if values.numel() < 8:
        return None
    head = values[:256]  # nearly every other tensor is told apart here
    scale = head.amax()
    if not bool(scale > 0) or not bool(((head == 0) | (head == scale)).all()):
        return None
    open_N = values != 0
    if not torch.equal(open_N * scale, values):
        return None
    return TwoValued(Mask(bits_of(open_N), order), 0.0, scale.item(), x.dtype)
