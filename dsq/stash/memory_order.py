"""A tensor as its distinct values in the order they lie in memory: the same for all views of one piece of memory."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class MemoryOrder:
    """A strided tensor as its distinct values in the order they lie in memory.

    Axes of stride 0 (expanded) are dropped, the others sorted from the widest stride to the narrowest, so that a
    transposed or reshaped view of one piece of memory gives the same values in the same order as the tensor it views.
    """

    sizes: tuple[int, ...]  #: of the values, in memory order
    axes: tuple[int, ...]  #: axis of the tensor that each of these is
    shape: torch.Size  #: of the tensor

    @classmethod
    def of(cls, tensor: Tensor) -> tuple[Self, Tensor]:
        """(the order, the values): detached, axes in memory order, contiguous where the tensor has no gaps."""
        values = tensor.detach()
        if values.is_contiguous():
            return cls.contiguous(values.shape), values
        order, strides = cls._strided(values.shape, values.stride())
        return order, values.as_strided(order.sizes, strides)

    @classmethod
    @lru_cache(maxsize=4096)  # of a tensor's shape, of which training has few
    def contiguous(cls, shape: torch.Size) -> Self:
        """That of a contiguous tensor."""
        return cls(shape, tuple(range(len(shape))), shape)

    @classmethod
    @lru_cache(maxsize=4096)
    def _strided(cls, shape: torch.Size, strides: tuple[int, ...]) -> tuple[Self, tuple[int, ...]]:
        """The order of a tensor, and the strides of its values."""
        distinct = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
        # sizes of 1 may carry any stride: they go first, where they disturb nothing
        axes = tuple(sorted(range(len(shape)), key=lambda axis: (distinct[axis] > 1, -strides[axis])))
        return cls(tuple(distinct[a] for a in axes), axes, shape), tuple(strides[a] for a in axes)

    def flat(self, tensor: Tensor) -> Tensor:
        """The values, (N,), of a tensor without gaps that is laid out like this one."""
        return tensor.detach().permute(self.axes).reshape(-1)

    def restore(self, values: Tensor) -> Tensor:
        """The tensor's shape around its values in memory order, given contiguous, in any shape."""
        return values.as_strided(self.shape, self._strides)

    @property
    def count(self) -> int:
        """Distinct values."""
        return prod(self.sizes)

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        """Of the tensor, without its gaps."""
        strides = [0] * len(self.shape)
        run = 1
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            strides[axis] = run if size == self.shape[axis] else 0  # expanded
            run *= size
        return tuple(strides)


def span(values: Tensor) -> tuple[object, ...]:
    """Equal for the values of two tensors of one storage exactly when they cover the same memory in the same order."""
    if values.is_contiguous():
        return values.storage_offset(), values.dtype, values.numel()
    merged: list[tuple[int, int]] = []
    for size, stride in zip(values.shape, values.stride(), strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return values.storage_offset(), values.dtype, tuple(merged)
