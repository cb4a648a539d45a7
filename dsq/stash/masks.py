"""Exact 1-bit masks: all that the backward of ReLU and dropout needs of a tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dsq.kernels import pack_mask, unpack_mask
from dsq.stash.saved import MemoryOrder


@dataclass(frozen=True)
class Mask:
    """A tensor's sides in one bit an element, ceil(N / 8) bytes; bit i % 8 of byte i // 8 is element i of memory."""

    bits: Tensor  #: uint8
    order: MemoryOrder

    @classmethod
    def of(cls, tensor: Tensor, low: float = 0.0, high: float = math.nan, nan_is_open: bool = True) -> Mask:
        """``tensor`` (floating or bool, any shape) in bits: 1 where it lies between the limits (kernels.masks)."""
        order, values = MemoryOrder.of(tensor)
        return cls(pack_mask(values.contiguous(), low, high, nan_is_open), order)

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    def unpack(self, closed: float, open: float, dtype: torch.dtype, spare: Spare | None = None) -> Tensor:
        """A tensor laid out like the one masked: ``open`` where the bit is 1, else ``closed``."""
        count = math.prod(self.order.sizes)
        room = spare.lend(count, dtype) if spare is not None and self.bits.device.type == "cpu" else None
        return self.order.restore(unpack_mask(self.bits, count, closed, open, dtype, room))


@dataclass(eq=False)
class Spare:
    """Memory that a backward's unpacked tensors take turns in: fresh pages cost ten times the unpacking."""

    memory: list[Tensor] = field(default_factory=list)

    def lend(self, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` values of any content in memory that nothing else refers to."""
        try:
            memory = self.memory.pop()  # in one step: another thread finds it gone
        except IndexError:
            memory = torch.empty(0, dtype=dtype, device="cpu")
        # 2: `memory`, and the handle that is asked here
        if memory.numel() < count or torch._C._storage_Use_Count(memory.untyped_storage()._cdata) > 2:
            memory = torch.empty(count, dtype=dtype, device="cpu")
        self.memory.append(memory)
        return memory[:count]


#: alive as long as a tensor of its type is kept
_spares: WeakValueDictionary[torch.dtype, Spare] = WeakValueDictionary()


def _spare(dtype: torch.dtype) -> Spare:
    return _spares.get(dtype) or _spares.setdefault(dtype, Spare())


@dataclass(frozen=True)
class TwoValued:
    """A floating or boolean tensor of two values, one bit an element."""

    mask: Mask
    closed: float  #: the value where the mask is 0
    open: float  #: the value where it is 1
    dtype: torch.dtype
    spare: Spare = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spare", _spare(self.dtype))

    @property
    def nbytes(self) -> int:
        return self.mask.nbytes

    def get(self) -> Tensor:
        """The tensor, as it was laid out."""
        return self.mask.unpack(self.closed, self.open, self.dtype, self.spare)


def exact(tensor: Tensor) -> TwoValued | None:
    """A boolean tensor, or a floating one whose values are 0 and one positive number (dropout noise on the CPU), in one
    bit an element; None for any other.
    """
    if tensor.dtype is torch.bool:
        return TwoValued(Mask.of(tensor), False, True, tensor.dtype)
    if not tensor.is_floating_point() or tensor.numel() < 8:
        return None
    _, values = MemoryOrder.of(tensor)
    head = values.reshape(-1)[:256]  # nearly every other tensor is told apart here
    scale = head.amax()
    if not bool(scale > 0) or not bool(((head == 0) | (head == scale)).all()):
        return None
    mask, value = Mask.of(tensor), scale.item()
    is_mask = torch.equal(mask.unpack(0.0, value, tensor.dtype), tensor.detach())
    return TwoValued(mask, 0.0, value, tensor.dtype) if is_mask else None
