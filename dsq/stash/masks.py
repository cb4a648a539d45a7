"""Exact 1-bit masks: all that the backward of ReLU and dropout needs of a tensor."""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from dsq.kernels.backend import FLOATS
from dsq.kernels.dispatch import pack_mask, unpack_mask
from dsq.stash.memory_order import MemoryOrder


@dataclass(frozen=True)
class Mask:
    """A tensor's sides in one bit an element, ceil(N / 8) bytes; bit i % 8 of byte i // 8 is element i of memory."""

    bits: Tensor  #: uint8
    order: MemoryOrder

    @classmethod
    def of(cls, tensor: Tensor, low: float = 0.0, high: float = math.nan, nan_is_open: bool = True) -> Self:
        """``tensor`` (floating or bool, any shape) in bits: 1 where it lies between the limits
        (kernels/reference/masks.py)."""
        order, values = MemoryOrder.of(tensor)
        return cls(pack_mask(values, low, high, nan_is_open), order)

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def unpack(self, closed: float, open: float, dtype: torch.dtype) -> Tensor:
        """A tensor laid out like the one masked: ``open`` where the bit is 1, else ``closed``."""
        return self.order.restore(unpack_mask(self.bits, math.prod(self.order.sizes), closed, open, dtype))


@dataclass(frozen=True)
class TwoValued:
    """A floating or boolean tensor of two values, one bit an element."""

    mask: Mask
    closed: float  #: the value where the mask is 0
    open: float  #: the value where it is 1
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.mask.nbytes

    @property
    def mask_bits(self) -> Tensor:
        """The mask's, uint8."""
        return self.mask.bits

    def get(self) -> Tensor:
        """The tensor, as it was laid out."""
        return self.mask.unpack(self.closed, self.open, self.dtype)


def one_bit(tensor: Tensor) -> TwoValued | None:
    """A boolean tensor, or a floating one whose values are 0 and at most one other number (dropout noise on the CPU;
    -inf, of a mask that is added to scores), in one bit an element; None for any other.
    """
    if tensor.dtype is torch.bool:
        return TwoValued(Mask.of(tensor), False, True, tensor.dtype)
    if tensor.dtype not in FLOATS or tensor.numel() < 8:
        return None
    _, values = MemoryOrder.of(tensor)
    flat = values.reshape(-1)
    if len({*flat[:16].tolist(), 0.0}) > 2:  # nearly every other tensor is told apart here
        return None
    others = {*flat[:256].tolist()} - {0.0} or {float(value) for value in flat.detach().aminmax()} - {0.0}
    if len(others) > 1:
        return None
    value = others.pop() if others else 1.0
    closed, open = min(value, 0.0), max(value, 0.0)
    found = TwoValued(Mask.of(tensor, low=min(value / 2, 0.0)), closed, open, tensor.dtype)
    return found if torch.equal(found.get(), tensor.detach()) else None
