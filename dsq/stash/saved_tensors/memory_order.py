"""A tensor as its distinct values in the order they lie in memory: the same for all views of one piece of memory."""

from dataclasses import dataclass
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
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if stride == 0 and size > 1:
                values = values.narrow(axis, 0, 1)
        # sizes of 1 may carry any stride: they go first, where they disturb nothing
        strides = values.stride()
        axes = tuple(sorted(range(values.dim()), key=lambda axis: (values.shape[axis] > 1, -strides[axis])))
        values = values.permute(axes)
        return cls(tuple(values.shape), axes, tensor.shape), values

    @classmethod
    def contiguous(cls, shape: torch.Size) -> Self:
        """That of a contiguous tensor."""
        return cls(shape, tuple(range(len(shape))), shape)

    def flat(self, tensor: Tensor) -> Tensor:
        """The values, (N,), of a tensor without gaps that is laid out like this one."""
        return tensor.detach().permute(self.axes).reshape(-1)

    def restore(self, flat: Tensor) -> Tensor:
        """The tensor's shape around its values in memory order, given flat."""
        if self.sizes == self.shape and self.axes == tuple(range(len(self.axes))):
            return flat.view(self.shape)
        inverse = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return flat.view(self.sizes).permute(inverse).expand(self.shape)


def span(values: Tensor) -> tuple[object, ...]:
    """Equal for the values of two tensors of one storage exactly when they cover the same memory in the same order."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(values.shape, values.stride(), strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return (values.storage_offset(), values.dtype, tuple(merged))
